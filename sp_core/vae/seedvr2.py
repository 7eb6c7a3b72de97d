"""The VAE of SeedVR2. Its tiles, and how it cuts the frames, are its own code; the workers compute what that calls for each tile."""

from __future__ import annotations

import torch
from torch import nn

from .plan import DecodePlan


def _ratio(vae: nn.Module) -> int:
    return int(vae.spatial_downsample_factor)  # type: ignore[arg-type]


def _on_device(vae: nn.Module, device: torch.device) -> None:
    """Its decode and encode note where their input lies."""
    vae.device = device  # type: ignore[assignment]


SEEDVR2 = DecodePlan(
    "comfy.ldm.seedvr.vae.VideoAutoencoderKLWrapper",
    "SeedVR2",
    _ratio,
    whole=("Attention",),
    padded={"Downsample3D": (0, 1)},
    calls=("slicing_decode", "slicing_encode"),
    limits=("get_norm_limit", "memory_limit"),
    before_call=_on_device,
)
