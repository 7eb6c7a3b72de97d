"""Conditioning of model families, where a node of the host would need an encoder."""

import json

import torch

from .latents import random


class SPTestConditioningTensors:
    """Sets random tensors in a conditioning: {"audio_embed": [1, 25, 1024, 20]}; a list of shapes makes a list of tensors."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"conditioning": ("CONDITIONING",), "tensors": ("STRING", {}), "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "set"
    CATEGORY = "test"

    def set(self, conditioning, tensors, seed):
        values = {}
        for number, (key, shape) in enumerate(json.loads(tensors).items()):
            if isinstance(shape[0], list):
                values[key] = [random(tuple(one), seed + 10 * number + i) for i, one in enumerate(shape)]
            else:
                values[key] = random(tuple(shape), seed + 10 * number)
        return ([[text, {**extra, **values}] for text, extra in conditioning],)


class SPTestVisionStates:
    """Random last hidden states of a picture encoder, (1, tokens, dim)."""

    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 1})
        return {"required": {"tokens": integer, "dim": integer, "seed": integer}}

    RETURN_TYPES = ("CLIP_VISION_OUTPUT",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, tokens, dim, seed):
        import comfy.clip_vision

        output = comfy.clip_vision.Output()
        output.last_hidden_state = random((1, tokens, dim), seed)
        return (output,)


class SPTestMiniMaxConditions:
    """Keyframes, or references of every kind, for a video of ``height`` x ``width`` latent places."""

    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 1})
        return {
            "required": {"conditioning": ("CONDITIONING",), "kind": (["keyframes", "references"],), "height": integer, "width": integer}
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "set"
    CATEGORY = "test"

    def set(self, conditioning, kind, height, width):
        values = self._keyframes(height, width) if kind == "keyframes" else self._references()
        return ([[text, {**extra, **values}] for text, extra in conditioning],)

    @staticmethod
    def _keyframes(height, width):
        return {
            "minimax_keyframes": [
                {"resolved_frame_index": 0, "latent": random((1, 24, 1, height, width), 4)},
                {"resolved_frame_index": 8, "audio_latent": random((1, 32, 2, 3), 6)},
            ],
            "minimax_visual_cond_noise_aug": 0.9,
        }

    @staticmethod
    def _references():
        return {
            "minimax_refs": [
                {"kind": "image", "latent_h": 6, "latent_w": 8, "latent": random((1, 24, 1, 6, 8), 4)},
                {"kind": "audio", "ref_audio_t": 4, "audio_latent": random((1, 32, 2, 4), 5)},
                {
                    "kind": "video_audio",
                    "latent_t": 2,
                    "latent_h": 4,
                    "latent_w": 6,
                    "ref_audio_t": 3,
                    "latent": random((1, 24, 2, 4, 6), 6),
                    "audio_latent": random((1, 32, 2, 3), 7),
                },
            ],
            "minimax_token_tags": torch.tensor([1, 1, 0, 0, 1, 1, 1]),
        }


class SPTestControl:
    """Gives both conditionings what a ControlNet of a UNet gives: something for each of its blocks, which depends on the latent."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"positive": ("CONDITIONING",), "negative": ("CONDITIONING",), "channels": ("INT", {"default": 320})}}

    RETURN_TYPES = ("CONDITIONING", "CONDITIONING")
    FUNCTION = "set"
    CATEGORY = "test"

    def set(self, positive, negative, channels):
        from comfy.controlnet import ControlBase

        class Control(ControlBase):
            def pre_run(self, *args):
                pass

            def get_models(self):
                return []

            def copy(self):
                return self

            def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
                made = x_noisy.mean(dim=1, keepdim=True) * random((1, channels, 1, 1), 3).to(x_noisy)
                return {"input": [made, None], "middle": [made[:1] * 0 + 1], "output": [made]}

        control = Control()
        # ComfyUI batches conditionings of one control only
        more = {"control": control, "control_apply_to_uncond": False}
        return tuple([[text, {**extra, **more}] for text, extra in conditioning] for conditioning in (positive, negative))
