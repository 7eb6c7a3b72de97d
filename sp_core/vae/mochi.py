"""The VAE of Mochi. Its convolutions pad by themselves; its attentions are over time."""

from __future__ import annotations

from torch import nn

from .plan import DecodePlan


def _ratio(vae: nn.Module) -> int:
    return int(vae.encoder.spatial_downsample)  # type: ignore[union-attr, arg-type]


MOCHI = DecodePlan("comfy.ldm.genmo.vae.model.VideoVAE", "Mochi", _ratio, apart=("Attention",))
