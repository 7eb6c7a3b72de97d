"""The VAEs of HunyuanVideo. Their convolutions get frames that a function has padded, in space and in time."""

from __future__ import annotations

from torch import nn

from .plan import DecodePlan


def _levels(vae: nn.Module) -> int:
    """Levels of the encoder that halve the rows."""
    return 2 ** sum(hasattr(level, "downsample") for level in vae.encoder.down)  # type: ignore[union-attr, misc]


_AUTOENCODER = "comfy.ldm.models.autoencoder"
_PADDED = {"CarriedConv3d": (1, 1)}

HUNYUAN_VIDEO = DecodePlan(
    f"{_AUTOENCODER}.AutoencoderKL(comfy.ldm.modules.diffusionmodules.model.Decoder)",
    "HunyuanVideo",
    _levels,
    whole=("AttnBlock",),
    padded=_PADDED,
)
HUNYUAN_VIDEO_15 = DecodePlan(
    f"{_AUTOENCODER}.AutoencodingEngine(comfy.ldm.hunyuan_video.vae_refiner.Decoder)",
    "HunyuanVideo 1.5",
    _levels,
    whole=("AttnBlock",),
    padded=_PADDED,
)
