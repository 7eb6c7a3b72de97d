"""What the planner needs to know of a model, read from its own modules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..planner.cost import ModelShape
from .plan import Blocks, SequencePlan


def model_shape(plan: SequencePlan, model: nn.Module) -> ModelShape | None:
    """A model's shape, read from the attributes and weights of its modules; None where they do not tell.

    Weights for a block's replicated tokens (``txt_...`` of a double block) are left out, because few
    tokens pass them. Every other weight counts as met by every token. That is a few per cent too
    many where a block also has weights for text or audio.
    """
    if not plan.splits_tokens:
        return None
    blocks = plan.blocks_of(model)
    named = plan.attentions[0]
    attention = blocks[0].get_submodule(named.module).get_submodule(named.heads_of)
    heads = _first(attention, "num_heads", "heads", "n_heads", "n_local_heads", "num_attention_heads")
    if not heads:
        return None
    head_dim = _first(attention, "head_dim", "dim_head", "headdim") or _width(attention) // heads
    if not head_dim:
        return None
    weights = sum(_stream_weights(kind, block) for kind in plan.blocks for block in kind.of(model))
    itemsize = (getattr(model, "dtype", None) or torch.float32).itemsize
    return ModelShape(type(model).__name__, len(blocks), heads, head_dim, 2.0 * weights / len(blocks), itemsize=max(2, itemsize))


def _stream_weights(kind: Blocks, block: nn.Module) -> int:
    aside = f"{kind.replicated.argument}_" if kind.replicated is not None and kind.replicated.argument is not None else None
    return sum(weight.numel() for name, weight in block.named_parameters() if aside is None or not name.startswith(aside))


def _width(attention: nn.Module) -> int:
    """Of all heads: by an attribute, or else what the attention's first projection takes."""
    named = _first(attention, "hidden_size", "inner_dim", "dim")
    return named or next((weight.size(1) for weight in attention.parameters() if weight.dim() == 2), 0)


def _first(module: Any, *names: str) -> int:
    return next((int(getattr(module, name)) for name in names if isinstance(getattr(module, name, None), int)), 0)


def _patch_of(model: Any) -> Any:
    """Places in a patch: an int, or one for each dim of the latent."""
    if hasattr(model, "patch_spatial"):
        return (model.patch_temporal, model.patch_spatial, model.patch_spatial)
    return getattr(model, "patch_size", getattr(model, "patch", 1))


def token_count(model: nn.Module, x: Any) -> int:
    """About how many video tokens an input (B, C, F, H, W) has: its places, divided by those in a patch."""
    x = x[0] if isinstance(x, (list, tuple)) else x
    patch = _patch_of(model)
    sizes = x.shape[2:]
    patch = (patch,) * len(sizes) if isinstance(patch, int) else tuple(patch)[-len(sizes) :]
    return math.prod(-(-size // step) for size, step in zip(sizes, patch, strict=False))
