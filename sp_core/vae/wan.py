"""The VAEs of Wan. Qwen-Image and LongCat-Video have Wan 2.1's as well."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .plan import DecodePlan


def _levels(vae: nn.Module) -> int:
    """Each level of the encoder but the last halves the rows."""
    return 2 ** (len(vae.dim_mult) - 1)  # type: ignore[arg-type]


def _pixels(vae: nn.Module, latent: Sequence[int], fold: int) -> tuple[int, ...]:
    """Of each latent frame four frames, of the first one one; ``fold``: rows and columns that the last convolution makes as channels."""
    scale = fold * _levels(vae)
    channels = vae.decoder.head[-1].out_channels // fold**2  # type: ignore[union-attr, index, operator]
    return latent[0], channels, 4 * latent[2] - 3, scale * latent[3], scale * latent[4]


WAN_21 = DecodePlan(
    "comfy.ldm.wan.vae.WanVAE",
    "Wan 2.1",
    _levels,
    whole=("AttentionBlock",),
    decoded_shape=lambda vae, latent: _pixels(vae, latent, 1),
)
#: it folds two rows of pixels into one before the first level
WAN_22 = DecodePlan(
    "comfy.ldm.wan.vae2_2.WanVAE",
    "Wan 2.2 5B",
    lambda vae: 2 * _levels(vae),
    whole=("AttentionBlock",),
    decoded_shape=lambda vae, latent: _pixels(vae, latent, 2),
)
