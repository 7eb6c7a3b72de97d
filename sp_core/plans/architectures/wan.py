"""Wan 2.1 / 2.2: text- and image-to-video, first-last-frame, per-frame timesteps, reference latents."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import nn

from ...layout import FlatLayout, SequenceLayout, TileLayout
from ..plan import Attention, Blocks, HookPoint, SequencePlan
from ..shard_rules import by_frame, by_token


def _tiles(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    """Tiles of the frame grid; reference tokens lie before the grid, in-context latents behind it."""
    grid = arguments["transformer_options"]["grid_sizes"]
    extra = tokens - prod(grid)
    prefix = extra if getattr(model, "ref_conv", None) is not None else 0
    return TileLayout.over(grid, world_size, prefix, extra - prefix)


def _layout(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    """Tiles when frames have timesteps of their own: then every rank has all frames and modulation stays one row a frame."""
    modulation, grid = arguments["e"], arguments["transformer_options"].get("grid_sizes")
    per_frame = modulation.ndim == 4 and modulation.size(1) > 1
    if per_frame and grid is not None and grid[0] == modulation.size(1) and prod(grid) == tokens:
        return _tiles(model, arguments, tokens, world_size)
    return FlatLayout(tokens, world_size)


WAN = SequencePlan(
    architecture="WanModel",
    strict=True,
    title="Wan 2.1 / 2.2",
    covers="text to video, image to video with and without CLIP vision, first and last frame, per-frame timesteps as in Wan 2.2 5B, "
    "reference latents",
    # e: (B, 1 or F, 6, C); freqs: (1, T, 1, D / 2, 2, 2)
    blocks=(Blocks("blocks", "x", (Attention("self_attn"),), {"e": by_frame(1), "freqs": by_token(1)}),),
    # head: LayerNorm, modulation and the projection to 64 channels
    hook_points=(HookPoint("head", {"e": by_frame(1)}, gather=True),),
    choose_layout=_layout,
    tiles=_tiles,
    between=("double_block",),
)
