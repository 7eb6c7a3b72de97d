"""What LongCat-Video's nodes do: latents with conditioning frames, guidance, the key/value cache. Needs ComfyUI."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import SPError
from .config import LongCatAvatar, LongCatVideo
from .kv_cache import KV_CACHE
from .model import BLOCK_SPARSE
from .schedules import cfg_zero

#: pixels a latent value stands for, and frames a latent frame after the first
_STRIDE, _FRAMES = 8, 4
#: what can compute block-sparse attention
SPARSE_KERNELS = ("gather", "flex_attention")


def conditioning_frames(available: int, wanted: int) -> int:
    """The most frames, at most ``wanted``, that whole latent frames are made of: 4 k + 1.

    Raises:
        SPError: there is no frame.
    """
    if available < 1:
        raise SPError("The video to go on from has no frames. Connect one that has, or none")
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
    import comfy.model_management

    if video is None:
        shape = _latent_shape(width, height, length)
        latent = torch.zeros(shape, device=comfy.model_management.intermediate_device())
        return {"samples": latent.repeat(batch_size, 1, 1, 1, 1)}
    made = latent_with_start(vae, width, height, length, video[-conditioning_frames(video.shape[0], wanted) :])
    return {name: value.repeat(batch_size, 1, 1, 1, 1) for name, value in made.items()}


def _latent_shape(width: int, height: int, length: int) -> tuple[int, ...]:
    return (1, 16, (length - 1) // _FRAMES + 1, height // _STRIDE, width // _STRIDE)


def latent_with_start(vae: Any, width: int, height: int, length: int, start: Tensor | None) -> dict[str, Tensor]:
    """A video of noise behind clean first frames, and the mask that keeps these.

    Args:
        start: (N, H, W, 3) in 0..1, the frames that it starts with; None for none.

    Returns:
        the host's LATENT: samples (1, 16, F, height / 8, width / 8), noise_mask (1, 1, F, ...).

    Raises:
        SPError: nothing is left to make.
    """
    import comfy.latent_formats
    import comfy.model_management
    import comfy.utils

    shape = _latent_shape(width, height, length)
    latent = torch.zeros(shape, device=comfy.model_management.intermediate_device())
    if start is None:
        return {"samples": latent}
    count = start.shape[0]
    if count >= length:
        raise SPError(f"{count} conditioning frames leave nothing of a video of {length}: raise length or lower conditioning_frames")
    pixels = comfy.utils.common_upscale(start.movedim(-1, 1), width, height, "bilinear", "center").movedim(1, -1)
    clean = vae.encode(pixels[..., :3])
    # the model takes what is still to be made as zeros; in ComfyUI's latents that is the latent format's mean
    latent = comfy.latent_formats.Wan21().process_out(latent)
    latent[:, :, : clean.shape[2]] = clean
    mask = torch.ones((1, 1, *shape[2:]), device=latent.device)
    mask[:, :, : clean.shape[2]] = 0
    return {"samples": latent, "noise_mask": mask}


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


def with_block_sparse(model: Any, sparsity: float, kernel: str = "gather") -> Any:
    """A clone of a MODEL whose self-attention leaves out a share of the tiles of keys.

    Args:
        sparsity: the share, 0..1.
        kernel: one of :data:`SPARSE_KERNELS`.

    Raises:
        SPError: the model is not LongCat-Video, or is its Avatar.
    """
    if not isinstance(model.model, LongCatVideo) or isinstance(model.model, LongCatAvatar):
        raise SPError(f"LongCat Block-Sparse Attention works with LongCat-Video only, this model is {type(model.model).__name__}")
    model = model.clone()
    model.model_options["transformer_options"][BLOCK_SPARSE] = {"sparsity": sparsity, "flex": kernel == "flex_attention"}
    return model


def refine_latent(
    vae: Any, video: Tensor, width: int, height: int, double_frames: bool, start: Tensor | None, wanted: int = 13
) -> dict[str, Tensor]:
    """A small video as what a refining pass over a large one starts from.

    Args:
        video: (N, H, W, 3) in 0..1.
        double_frames: put a frame between any two; the length becomes 4 k + 1 by repeating the last frame.
        start: (M, H, W, 3), what :func:`make_latent` was given for the small video, in full size. Its frames are doubled as those
            of the video are; as many as whole latent frames are made of are kept.
        wanted: how many of its last frames the small video starts with.

    Returns:
        the host's LATENT: samples (1, 16, F, height / 8, width / 8), and noise_mask (1, 1, F, ...) with ``start``.
    """
    import comfy.utils

    def scaled(frames: Tensor) -> Tensor:
        return comfy.utils.common_upscale(frames[..., :3].movedim(-1, 1), width, height, "bilinear", "center").movedim(1, -1)

    count = video.size(0)
    frames = _with_frames_between(video, count) if double_frames else video
    frames = torch.cat([frames, frames[-1:].expand((1 - frames.size(0)) % _FRAMES, -1, -1, -1)])
    samples = vae.encode(scaled(frames))
    if start is None:
        return {"samples": samples}
    start = start[-conditioning_frames(start.size(0), wanted) :][:count]
    if double_frames:
        start = _with_frames_between(start, count)
    clean = vae.encode(scaled(start[: conditioning_frames(start.size(0), frames.size(0) - _FRAMES)]))
    samples[:, :, : clean.shape[2]] = clean
    mask = torch.ones((1, 1, *samples.shape[2:]), device=samples.device)
    mask[:, :, : clean.shape[2]] = 0
    return {"samples": samples, "noise_mask": mask}


def _with_frames_between(frames_NHWC: Tensor, count: int) -> Tensor:
    """A video's first frames at twice as many moments at equal distances from its first frame to its last, each a mix of its neighbours.

    Args:
        frames_NHWC: the first of the video's frames, or all; moments behind the last of them are left out.
        count: how many frames the video has.
    """
    n = frames_NHWC.size(0)
    if n == 1:
        return frames_NHWC
    at = torch.linspace(0, count - 1, 2 * count, dtype=torch.float64)
    at = at[at <= n - 1]
    before = at.floor().clamp_max(n - 2).long()
    share = (at - before).to(frames_NHWC.dtype)[:, None, None, None]
    return frames_NHWC[before].lerp(frames_NHWC[before + 1], share)
