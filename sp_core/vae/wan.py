"""The VAEs of Wan. Qwen-Image and LongCat-Video have Wan 2.1's as well."""

from __future__ import annotations

from torch import nn

from .plan import DecodePlan


def _levels(vae: nn.Module) -> int:
    """Each level of the encoder but the last halves the rows."""
    return 2 ** (len(vae.dim_mult) - 1)  # type: ignore[arg-type]


WAN_21 = DecodePlan("comfy.ldm.wan.vae.WanVAE", "Wan 2.1", _levels, whole=("AttentionBlock",))
#: it folds two rows of pixels into one before the first level
WAN_22 = DecodePlan("comfy.ldm.wan.vae2_2.WanVAE", "Wan 2.2 5B", lambda vae: 2 * _levels(vae), whole=("AttentionBlock",))
