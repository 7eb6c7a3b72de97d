"""A second device as ComfyUI's memory management sees one. No test machine has two GPUs: it is the CPU with an index, and little memory."""

import torch

from .base import ModelNode, rank

FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)


class SPTestOnFirstDevice(ModelNode):
    """In ComfyUI's process the MODEL's own device is the first of two."""

    def patch(self, model):
        model = model.clone()
        if rank() is None:
            model.load_device = FIRST
        return (model,)


class SPTestEncoderOnSecondDevice:
    """Loads a text encoder, as large as the model, onto a device that has room for one of the two."""

    encoder = None

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "model": ("MODEL",)}}

    RETURN_TYPES = ("LATENT",)
    OUTPUT_NODE = True
    FUNCTION = "encode"
    CATEGORY = "test"

    def encode(self, samples, model):
        import comfy.model_management as management
        import comfy.model_patcher

        from sp_core.host.ui.status import status

        cls, size = type(self), model.sp.weight_bytes
        if cls.encoder is None:
            module = torch.nn.Linear(1024, size // 4096, bias=False)
            cls.encoder = comfy.model_patcher.ModelPatcher(module, load_device=SECOND, offload_device=torch.device("cpu"))
            _limit(management, management.minimum_inference_memory() + 1.5 * size)
        there = cls.encoder.loaded_size() > 0
        before = [worker["weight_bytes"] for worker in status()["workers"]]
        management.load_models_gpu([cls.encoder])
        held = [worker["weight_bytes"] for worker in status()["workers"]]
        return {"ui": {"encoder": [there], "before": before, "held": held}, "result": (samples,)}


def _limit(management, capacity):
    """The second device has this much memory, of which is free what nothing in ComfyUI's list of loaded models takes."""
    measured = management.get_free_memory

    def free_memory(dev=None, torch_free_too=False):
        if dev != SECOND:
            return measured(dev, torch_free_too)
        loaded = (entry for entry in management.current_loaded_models if entry.device == SECOND and entry.model is not None)
        free = capacity - sum(entry.model_loaded_memory() for entry in loaded)
        return (free, 0) if torch_free_too else free

    management.get_free_memory = free_memory
