"""The VAE of MiniMax H3. It computes tiles of 256 x 256 pixels, always; its decoder is a transformer over all places of a tile."""

from __future__ import annotations

from torch import nn

from .plan import DecodePlan


def _ratio(vae: nn.Module) -> int:
    return int(vae.vae_ratio)  # type: ignore[arg-type]


_DECODE, _ENCODE = "_decode_pixels", "_encode_moments"
MINIMAX_H3 = DecodePlan(
    "comfy.ldm.minimax.vae.MiniMaxH3VideoVAE",
    "MiniMax H3",
    _ratio,
    calls=(_DECODE, _ENCODE),
    bands=False,
    tiles={"tiled_decode": _DECODE, "tiled_encode": _ENCODE},
)
