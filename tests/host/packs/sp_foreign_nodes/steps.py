"""Nodes that change Python objects for the time of one step: a forward, the blocks, an attention global."""

import types
import unittest.mock

import torch

from .base import ModelNode


class SPForeignForwardSwapped(ModelNode):
    """A cache that replaces the forward of the model that it saw when the node ran."""

    def patch(self, model):
        model = model.clone()
        inner = model.get_model_object("diffusion_model")

        def weaker(self, *args, **kwargs):
            return 0.8 * type(self).forward_orig(self, *args, **kwargs)

        def wrapper(function, args):
            with unittest.mock.patch.multiple(inner, forward_orig=types.MethodType(weaker, inner)):
                return function(args["input"], args["timestep"], **args["c"])

        model.set_model_unet_function_wrapper(wrapper)
        return (model,)


class SPForeignBlocksSwapped(ModelNode):
    """A cache that puts one block in the place of all blocks."""

    def patch(self, model):
        model = model.clone()
        inner = model.get_model_object("diffusion_model")
        first = inner.transformer_blocks[0]

        def wrapper(function, args):
            with unittest.mock.patch.object(inner, "transformer_blocks", torch.nn.ModuleList([first])):
                return function(args["input"], args["timestep"], **args["c"])

        model.set_model_unet_function_wrapper(wrapper)
        return (model,)


class SPForeignAttentionSwapped(ModelNode):
    """A sparse attention that takes the place of the host's attention function in the model's module."""

    def patch(self, model):
        import comfy.ldm.wan.model as host

        model = model.clone()

        def sharper(q, *args, **kwargs):
            return plain(q * 1.5, *args, **kwargs)

        plain = host.optimized_attention

        def wrapper(function, args):
            with unittest.mock.patch("comfy.ldm.wan.model.optimized_attention", sharper):
                return function(args["input"], args["timestep"], **args["c"])

        model.set_model_unet_function_wrapper(wrapper)
        return (model,)


class SPForeignBlockForwardSwapped(ModelNode):
    """A wrapper around the model's forward that replaces the forward of a block."""

    def patch(self, model):
        from comfy.patcher_extension import WrappersMP

        model = model.clone()

        def wrapper(executor, *args, **kwargs):
            block = executor.class_obj.blocks[1]
            plain = block.forward
            block.forward = lambda *a, **k: 0.8 * plain(*a, **k)
            try:
                return executor(*args, **kwargs)
            finally:
                del block.forward

        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "sp_foreign_nodes", wrapper)
        return (model,)
