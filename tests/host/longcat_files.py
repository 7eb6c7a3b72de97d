"""The tiny LongCat-Video checkpoint in the two layouts that its files have."""

from __future__ import annotations

from distributed.longcat_ranks import reference
from torch import Tensor

from sp_core.models.longcat.keys import fused_parts, rekeyed_name


def weights() -> dict[str, Tensor]:
    """As the official file has them."""
    return {key[len("model.") :]: value for key, value in reference().items() if key.startswith("model.")}


def rekeyed() -> dict[str, Tensor]:
    """As community files have them: Wan's module names, and no fused projections."""
    out = {}
    for key, value in weights().items():
        module, _, kind = key.rpartition(".")
        for name, part in zip(parts := fused_parts(module) or [module], value.chunk(len(parts)), strict=True):
            out[f"{rekeyed_name(name)}.{kind}"] = part.contiguous()
    return out
