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


class SPTestUni3CPatch:
    """A MODEL_PATCH of ComfyUI's class for Uni3C, for a Wan of 96 channels; it has a layer less than that."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"layers": ("INT", {"default": 2})}}

    RETURN_TYPES = ("MODEL_PATCH",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, layers):
        import comfy.model_management
        import comfy.model_patcher
        import comfy.ops
        from comfy.ldm.wan.uni3c import WanUni3CControlnet

        sizes = {"conv_out_dim": 24, "dim": 32, "ffn_dim": 32, "num_heads": 2, "num_layers": layers, "mid_channels": 8}
        widths = {"time_embed_dim": 96, "out_proj_dim": 96}
        model = WanUni3CControlnet(**sizes, **widths, device="cpu", dtype=torch.float32, operations=comfy.ops.manual_cast)
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
