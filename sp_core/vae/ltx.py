"""The VAE of LTX-Video and LTX-2."""

from __future__ import annotations

import math

from torch import nn

from .plan import DecodePlan


def _ratio(vae: nn.Module) -> int:
    """A patch of rows, and what the decoder's blocks make of one row."""
    decoder = vae.decoder
    return int(decoder.patch_size) * math.prod(block.stride[1] for block in decoder.up_blocks if hasattr(block, "stride"))  # type: ignore[union-attr, arg-type, index]


def _refuses(vae: nn.Module) -> str | None:
    if any(getattr(module, "inject_noise", False) for module in vae.modules()):
        return "its blocks add random numbers to the frame, which each device would draw for itself"
    return None if vae.config.get("dims") == 3 else "its convolutions are split into space and time"  # type: ignore[union-attr, operator]


#: decode adds noise to the latent, which ComfyUI's process draws as it does for one device
LTX_VIDEO = DecodePlan(
    "comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE",
    "LTX-Video / LTX-2",
    _ratio,
    calls=("decoder", "encoder"),
    chunk_sizes=("get_max_chunk_size",),
    refuses=_refuses,
)
