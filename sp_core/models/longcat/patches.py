"""What LongCat-Video's nodes do: latents with conditioning frames, guidance, the key/value cache. Needs ComfyUI."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import SPError
from .conditioning import KV_CACHE
from .config import LongCatVideo
from .schedules import cfg_zero

#: pixels a latent value stands for, and frames a latent frame after the first
_STRIDE, _FRAMES = 8, 4


def conditioning_frames(available: int, wanted: int) -> int:
    """The most frames, at most ``wanted``, that whole latent frames are made of: 4 k + 1.

    Raises:
        ValueError: there is no frame.
    """
    if available < 1:
        raise ValueError("the conditioning video has no frames")
    return (min(available, max(1, wanted)) - 1) // _FRAMES * _FRAMES + 1


def make_latent(vae: Any, width: int, height: int, length: int, batch_size: int, video: Tensor | None, wanted: int) -> dict[str, Any]:
    """An empty video whose first frames are the last ones of ``video``, and the mask that keeps them.

    Args:
        vae: the host's VAE of Wan 2.1.
        video: (N, H, W, 3) in 0..1, one picture or a video to go on with; None for text-to-video.
        wanted: how many of its frames to use, rounded down to 4 k + 1.

    Returns:
        the host's LATENT: samples (B, 16, F, height / 8, width / 8), noise_mask (B, 1, F, ...) with ``video``.

    Raises:
        SPError: the video to make has no frame beyond those.
    """
    import comfy.latent_formats
    import comfy.model_management
    import comfy.utils

    shape = (1, 16, (length - 1) // _FRAMES + 1, height // _STRIDE, width // _STRIDE)
    latent = torch.zeros(shape, device=comfy.model_management.intermediate_device())
    if video is None:
        return {"samples": latent.repeat(batch_size, 1, 1, 1, 1)}
    count = conditioning_frames(video.shape[0], wanted)
    if count >= length:
        raise SPError(f"{count} conditioning frames leave nothing of a video of {length}: raise length or lower conditioning_frames")
    pixels = comfy.utils.common_upscale(video[-count:].movedim(-1, 1), width, height, "bilinear", "center").movedim(1, -1)
    clean = vae.encode(pixels[..., :3])
    # the model takes what is still to be made as zeros; in ComfyUI's latents that is the latent format's mean
    latent = comfy.latent_formats.Wan21().process_out(latent)
    latent[:, :, : clean.shape[2]] = clean
    mask = torch.ones((1, 1, *shape[2:]), device=latent.device)
    mask[:, :, : clean.shape[2]] = 0
    return {"samples": latent.repeat(batch_size, 1, 1, 1, 1), "noise_mask": mask.repeat(batch_size, 1, 1, 1, 1)}


def with_cfg_zero(model: Any) -> Any:
    """A clone of a MODEL whose guidance is :func:`.schedules.cfg_zero`, on velocities."""
    model = model.clone()
    # x minus a denoised prediction is sigma times the velocity
    model.set_model_sampler_cfg_function(lambda args: cfg_zero(args["cond"], args["uncond"], args["cond_scale"]))
    return model


def with_kv_cache(model: Any, device: str) -> Any:
    """A clone of a MODEL that computes its conditioning frames once a sampling run.

    Args:
        device: "gpu" keeps keys and values where they are computed, "cpu" in main memory.

    Raises:
        SPError: the model is not LongCat-Video.
    """
    import comfy.patcher_extension

    if not isinstance(model.model, LongCatVideo):
        raise SPError(f"LongCat KV Cache works with LongCat-Video only, this model is {type(model.model).__name__}")
    model = model.clone()
    model.model_options["transformer_options"][KV_CACHE] = device
    model.add_callback(comfy.patcher_extension.CallbacksMP.ON_CLEANUP, lambda patcher: patcher.model.diffusion_model.clear_cache())
    return model
