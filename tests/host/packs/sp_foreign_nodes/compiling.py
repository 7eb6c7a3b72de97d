"""Backends of torch.compile."""

import os
import time

import torch

from .base import ModelNode, rank


class SPForeignBackend(ModelNode):
    """Asks for a backend of the pack's own, which leaves the graph as it is. It waits for a file, if one is named, or fails on a rank."""

    @classmethod
    def INPUT_TYPES(cls):
        optional = {"until": ("STRING", {"default": ""}), "fails_on": ("INT", {"default": -1, "min": -1})}
        return {"required": {"model": ("MODEL",)}, "optional": optional}

    def patch(self, model, until="", fails_on=-1):
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        def backend(graph, inputs):
            if rank() == fails_on:
                raise RuntimeError("a fault of the backend")
            while until and not os.path.exists(until):
                time.sleep(0.02)
            return graph.forward

        name = f"sp_foreign_{'slow' if until else 'failing' if fails_on >= 0 else 'plain'}"
        if name not in torch._dynamo.list_backends(None):
            torch._dynamo.register_backend(backend, name=name)
        model = model.clone()
        set_torch_compile_wrapper(model, name)
        return (model,)
