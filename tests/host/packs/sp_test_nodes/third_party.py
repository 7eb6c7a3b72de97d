"""What packs do to models, in their own ways: chunked attention, guidance in cross-attention, residuals, swapping, caches."""

import logging
import threading
import types

import torch

from .base import ModelNode
from .latents import random


class SPTestHeadChunks(ModelNode):
    """Attends in three groups of heads, one after the other, to save memory: 56 heads are 19, 19 and 18."""

    def patch(self, model):
        model = model.clone()
        for i, block in enumerate(model.get_model_object("diffusion_model").blocks):
            model.add_object_patch(f"diffusion_model.blocks.{i}.self_attn.forward", types.MethodType(_in_head_groups, block.self_attn))
        return (model,)


def _in_head_groups(self, x, freqs, transformer_options=None):
    from comfy.ldm.flux.math import apply_rope1
    from comfy.ldm.modules.attention import optimized_attention

    q, k = (
        apply_rope1(norm(to(x)).unflatten(2, (self.num_heads, -1)), freqs) for norm, to in ((self.norm_q, self.q), (self.norm_k, self.k))
    )
    v = self.v(x).unflatten(2, (self.num_heads, -1))
    outs = []
    for heads in torch.arange(self.num_heads).tensor_split(3):
        if len(heads):
            part = slice(int(heads[0]), int(heads[-1]) + 1)
            group = [t[:, :, part].flatten(2) for t in (q, k, v)]
            outs.append(optimized_attention(*group, heads=len(heads), transformer_options=transformer_options or {}))
    return self.o(torch.cat(outs, dim=-1))


class SPTestCrossAttentionGuidance(ModelNode):
    """Guidance by a second text inside cross-attention, normalised for each token: how packs bring NAG to Wan."""

    def patch(self, model):
        model = model.clone()
        negative = random((1, 5, 384), 77)
        for i, block in enumerate(model.get_model_object("diffusion_model").blocks):
            forward = _guided(block.cross_attn, negative)
            model.add_object_patch(f"diffusion_model.blocks.{i}.cross_attn.forward", forward)
        return (model,)


def _guided(module, negative):
    # not module.forward: ComfyUI leaves there what a branch of the same loader put in, and which of them runs first is not fixed
    plain = types.MethodType(type(module).forward, module)

    def forward(x, context, **kwargs):
        positive_out = plain(x, context, **kwargs)
        negative_out = plain(x, negative.to(context).expand(x.shape[0], -1, -1), **kwargs)
        guided = positive_out * 3.0 - negative_out * 2.0
        scale = positive_out.abs().sum(-1, keepdim=True) / guided.abs().sum(-1, keepdim=True).clamp_min(1e-6)
        return 0.4 * guided * scale.clamp(max=1.0) + 0.6 * positive_out

    return forward


class SPTestResiduals(ModelNode):
    """A ControlNet's way: adds to the tokens between two blocks, by their place and by what all tokens are."""

    def patch(self, model):
        model = model.clone()

        def add(args):
            tokens = args["img"]
            if args["block_index"] != 1:
                return {"img": tokens}
            control = random((1, tokens.shape[1], tokens.shape[2]), 5).to(tokens)
            return {"img": tokens + 0.3 * control + tokens.mean(1, keepdim=True) - tokens.flip(1)}

        model.set_model_patch(add, "double_block")
        return (model,)


class SPTestBlockSwap(ModelNode):
    """Keeps the blocks' weights elsewhere and brings each in for its call only."""

    def patch(self, model):
        from comfy.patcher_extension import CallbacksMP

        model = model.clone()

        def swap(patcher, *args, **kwargs):
            logging.info("SPTestBlockSwap takes over")
            for block in patcher.model.diffusion_model.blocks:
                if not hasattr(block, "swapped_out"):
                    block.swapped_out = {name: p.data.clone() for name, p in block.named_parameters()}
                    block.register_forward_pre_hook(_bring_in)
                    block.register_forward_hook(_send_away)
                    _send_away(block)

        model.add_callback(CallbacksMP.ON_LOAD, swap)
        return (model,)


def _bring_in(block, *args):
    for name, parameter in block.named_parameters():
        parameter.data.copy_(block.swapped_out[name])


def _send_away(block, *args):
    for parameter in block.parameters():
        parameter.data.zero_()


class SPTestAttentionPatch(ModelNode):
    """A function on the attention's inputs or its output that nobody has read."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "place": ("STRING", {"default": "attn1_patch"})}}

    def patch(self, model, place):
        model = model.clone()
        model.set_model_patch(lambda args: args["x"], place)
        return (model,)


class SPTestForwardReplaced(ModelNode):
    """A cache that replaces the model's own forward: as an object patch, or for the time of a sampling step."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "while_sampling": ("BOOLEAN", {"default": False})}}

    def patch(self, model, while_sampling):
        model = model.clone()
        inner = model.get_model_object("diffusion_model")
        if not while_sampling:
            model.add_object_patch("diffusion_model.forward_orig", inner.forward_orig)
            return (model,)

        def wrapper(apply_model, args):
            inner = getattr(apply_model, "__self__").diffusion_model  # noqa: B009
            inner.forward_orig = lambda *a, **k: None
            return apply_model(args["input"], args["timestep"], **args["c"])

        model.set_model_unet_function_wrapper(wrapper)
        return (model,)


class SPTestPatchWhileSampling(ModelNode):
    """A guidance that changes a block for one forward, by a function that can be sent elsewhere or that is ``locked``."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}, "optional": {"locked": ("BOOLEAN", {"default": False})}}

    def patch(self, model, locked=False):
        import comfy.model_patcher
        import comfy.samplers

        model = model.clone()
        lock = threading.Lock() if locked else None

        def weaker(args, extra):
            assert lock is None or not lock.locked()
            out = extra["original_block"](args)
            return {**out, "img": out["img"] * 0.9}

        def guide(args):
            options = comfy.model_patcher.set_model_options_patch_replace(args["model_options"].copy(), weaker, "dit", "double_block", 1)
            (other,) = comfy.samplers.calc_cond_batch(args["model"], [args["cond"]], args["input"], args["sigma"], options)
            return args["denoised"] + (args["cond_denoised"] - other)

        model.set_model_sampler_post_cfg_function(guide)
        return (model,)
