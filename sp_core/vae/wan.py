"""Wan 2.1's VAE, which Qwen-Image and LongCat-Video have as well."""

from __future__ import annotations

from torch import nn

from .plan import DecodePlan


def _ratio(vae: nn.Module) -> int:
    """Each level of the encoder but the last halves the rows."""
    return 2 ** (len(vae.dim_mult) - 1)  # type: ignore[arg-type]


WAN_21 = DecodePlan("comfy.ldm.wan.vae.WanVAE", "Wan 2.1 VAE", _ratio, whole=("AttentionBlock",))
