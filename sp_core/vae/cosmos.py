"""The VAE of Cosmos, which folds rows by wavelets of two rows before its first level."""

from __future__ import annotations

from typing import Any

from torch import nn

from .plan import DecodePlan, Rows


def _ratio(vae: nn.Module) -> int:
    encoder: Any = vae.encoder
    return int(encoder.patcher3d.patch_size) * 2 ** min(encoder.num_spatial_downs, encoder.num_resolutions - 1)


def _rows_added(conv: nn.Module) -> Rows:
    """It pads above and below by itself; where it does not, the code that halves the rows has added one below."""
    rows = int(conv.spatial_pad[-1])  # type: ignore[index, arg-type]
    return (rows, rows) if rows else (0, 1)


COSMOS = DecodePlan(
    "comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer",
    "Cosmos",
    _ratio,
    whole=("CausalAttnBlock",),
    # of the row that they add below they make nothing, as bands have an even number of rows there
    apart=("Patcher3D", "UnPatcher3D"),
    apart_functions=("avg_pool3d",),
    padded={"CausalConv3d": _rows_added},
)
