"""The VAE of CogVideoX."""

from __future__ import annotations

from torch import nn

from .plan import DecodePlan


def _ratio(vae: nn.Module) -> int:
    """Each block of the encoder but the last halves the rows."""
    return 2 ** (len(vae.encoder.down_blocks) - 1)  # type: ignore[union-attr, arg-type]


COGVIDEOX = DecodePlan(
    "comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX",
    "CogVideoX",
    _ratio,
    padded={"Downsample3D": (0, 1)},
)
