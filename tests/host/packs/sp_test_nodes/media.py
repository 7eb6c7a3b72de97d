"""Pictures, sound and stand-ins for their encoders, so that the host's own conditioning nodes can run without big models."""

import types

import torch

from .latents import random


class _VideoEncoder:
    """Averages pixels over the latent's cells and mixes the three colours into its channels."""

    def __init__(self, channels, time_stride, stride):
        self.latent_channels, self.time_stride, self.stride = channels, time_stride, stride
        self.downscale_index_formula = (time_stride, stride, stride)

    def spacial_compression_encode(self):
        return self.stride

    def temporal_compression_decode(self):
        return self.time_stride

    def encode(self, pixels):
        """(F, H, W, 3) to (1, C, (F - 1) // time_stride + 1, H // stride, W // stride)."""
        frames = torch.nn.functional.avg_pool2d(pixels[..., :3].movedim(-1, 1), self.stride)
        groups = [frames[:1], *frames[1:].split(self.time_stride)]
        groups = groups[: (len(frames) - 1) // self.time_stride + 1]
        pooled = torch.stack([group.mean(0) for group in groups], dim=1)  # (3, F', h, w)
        return torch.einsum("oc,cfhw->ofhw", random((self.latent_channels, 3), 99), pooled)[None] * 2 - 1

    def encode_tiled(self, pixels, **tiles):
        return self.encode(pixels)


class _AudioEncoder:
    audio_sample_rate = 16000
    autoencoder = types.SimpleNamespace(sampling_rate=16000, mel_hop_length=160)

    def encode(self, waveform):
        """(B, S, C) to (B, 8, S // 640, 16)."""
        steps = waveform.shape[1] // 640
        bins = waveform[:, : steps * 640].mean(-1).view(waveform.shape[0], 1, steps, 16, 40).mean(-1)
        return bins * torch.linspace(0.5, 8, 8).view(1, 8, 1, 1)


class SPTestVAE:
    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 1})
        return {"required": {"channels": integer, "time_stride": integer, "stride": integer}}

    RETURN_TYPES = ("VAE",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, channels, time_stride, stride):
        return (_VideoEncoder(channels, time_stride, stride),)


class SPTestAudioVAE:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    RETURN_TYPES = ("VAE",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self):
        return (_AudioEncoder(),)


class SPTestImage:
    """Random pixels, (frames, height, width, 3)."""

    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 1})
        return {"required": {"frames": integer, "height": integer, "width": integer, "seed": integer}}

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, frames, height, width, seed):
        return (random((frames, height, width, 3), seed).sigmoid(),)


class SPTestPixels:
    """Pixels as a latent, so that they are saved as they are."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "wrap"
    CATEGORY = "test"

    def wrap(self, image):
        return ({"samples": image},)


class SPTestMask:
    """Left half one, right half ``right``, (frames, height, width)."""

    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 1})
        return {"required": {"frames": integer, "height": integer, "width": integer, "right": ("FLOAT", {"default": 0.0})}}

    RETURN_TYPES = ("MASK",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, frames, height, width, right):
        mask = torch.ones(frames, height, width)
        mask[..., width // 2 :] = right
        return (mask,)


class SPTestAudio:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("INT", {"default": 6400}), "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("AUDIO",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, samples, seed):
        return ({"waveform": random((1, 2, samples), seed), "sample_rate": 16000},)


class SPTestLongCatVoice:
    """Random speech as a tiny LongCat-Video-Avatar takes it: (moments, 3, 8), two of which are a frame."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"moments": ("INT", {"default": 40}), "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("AUDIO_ENCODER_OUTPUT",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, moments, seed):
        return ({"longcat": {"values_nGC": random((moments, 3, 8), seed), "stride": 2}},)


class SPTestClipVision:
    """Random picture embeddings, (1, tokens, 1280)."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"tokens": ("INT", {"default": 257}), "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("CLIP_VISION_OUTPUT",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, tokens, seed):
        import comfy.clip_vision

        output = comfy.clip_vision.Output()
        output.penultimate_hidden_states = random((1, tokens, 1280), seed)
        return (output,)


class SPTestDownscale:
    """Guides that are ``factor`` times smaller than the video, as some IC-LoRAs want them."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"factor": ("INT", {"default": 1})}}

    RETURN_TYPES = ("IC_LORA_PARAMETERS",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, factor):
        return ({"reference_downscale_factor": factor},)
