"""Nodes that look: at the model, and at what a worker runs. And a route that restarts the server as a restart button does."""

import inspect
import os
import sys

from .base import ModelNode, note, rank


def _checks():
    """By name: (what a pack asks of a Wan model, the answer)."""
    import torch

    return {
        "class": (lambda m: m.__class__ in {sys.modules["comfy.ldm.wan.model"].WanModel}, True),
        "class name": (lambda m: m.__class__.__name__, "WanModel"),
        "type name": (lambda m: type(m).__name__, "WanModel"),
        "module of the class": (lambda m: type(m).__module__, "comfy.ldm.wan.model"),
        "isinstance": (lambda m: isinstance(m, sys.modules["comfy.ldm.wan.model"].WanModel), True),
        "attribute": (lambda m: (m.dim, m.num_heads, m.patch_size), (384, 3, (1, 2, 2))),
        "missing attribute": (lambda m: hasattr(m, "double_blocks"), False),
        "submodule": (lambda m: type(m.blocks[0].self_attn).__name__, "WanSelfAttention"),
        "submodule by path": (lambda m: type(m.get_submodule("blocks.0.self_attn")).__name__, "WanSelfAttention"),
        "names of modules": (lambda m: "blocks.0.self_attn.q" in dict(m.named_modules()), True),
        "children": (lambda m: "blocks" in dict(m.named_children()), True),
        "names of weights": (lambda m: "blocks.0.self_attn.q.weight" in m.state_dict(), True),
        "parameters": (lambda m: next(m.parameters()).dtype, torch.float32),
    }


class SPForeignLook(ModelNode):
    """Works on one kind of model only, and tells it as packs do."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "question": ("STRING", {"default": "class name"})}}

    def patch(self, model, question):
        ask, expected = _checks()[question]
        found = ask(model.model.diffusion_model)
        if found != expected:
            raise ValueError(f"{question}: this node is for {expected}, not for {found}")
        return (model.clone(),)


class SPForeignSpy(ModelNode):
    """From now on each worker that ran this node notes the class of every node of the user's graph that it runs."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "number": ("INT", {"default": 0, "max": 1 << 62})}}

    def patch(self, model, number):
        if rank() is not None:
            _spy()
        return (model.clone(),)


def _spy():
    import execution

    import nodes

    if hasattr(execution, "unwatched_get_output_data"):
        return
    run = execution.unwatched_get_output_data = execution.get_output_data
    signature = inspect.signature(run)

    async def get_output_data(*args, **kwargs):
        node = signature.bind(*args, **kwargs).arguments["obj"]
        kind = node if isinstance(node, type) else type(node)
        if kind.__name__ == "SPValue":
            # the value of a wire that crossed: it computes nothing
            return await run(*args, **kwargs)
        known = [name for name, value in dict.items(nodes.NODE_CLASS_MAPPINGS) if value is kind]
        note("ran", known[0] if known else kind.__name__)
        return await run(*args, **kwargs)

    execution.get_output_data = get_output_data


def add_restart_route():
    from server import PromptServer

    if rank() is not None or getattr(PromptServer, "instance", None) is None:
        return

    @PromptServer.instance.routes.get("/sp_foreign/restart")
    async def restart(request):
        """The program takes its own place, under its own process number."""
        os.execv(sys.executable, [sys.executable, *sys.argv])
