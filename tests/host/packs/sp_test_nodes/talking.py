"""What InfiniteTalk's node needs: a tiny patch for a Wan of 80 channels, and what an audio encoder gives."""

import torch

from .latents import random
from .tiny_models import _random_weights


class SPTestTalkingPatch:
    """A MODEL_PATCH of ComfyUI's class for MultiTalk and InfiniteTalk; its attention has 40 heads."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"layers": ("INT", {"default": 3})}}

    RETURN_TYPES = ("MODEL_PATCH",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, layers):
        import comfy.model_management
        import comfy.model_patcher
        import comfy.ops
        from comfy_extras.nodes_model_patch import MultiTalkModelPatch

        sizes = {"intermediate_dim": 16, "in_dim": 80, "out_dim": 24, "context_tokens": 4, "num_layers": layers}
        model = MultiTalkModelPatch(**sizes, device="cpu", dtype=torch.float32, operations=comfy.ops.manual_cast)
        model.load_state_dict(_random_weights(model, 5))
        devices = comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
        return (comfy.model_patcher.ModelPatcher(model, *devices),)


class SPTestSpeech:
    """A second of speech, as an audio encoder gives it: all its layers, at 50 Hz."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("AUDIO_ENCODER_OUTPUT",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, seed):
        return ({"encoded_audio_all_layers": [random((1, 50, 768), 100 * seed + layer) for layer in range(13)]},)
