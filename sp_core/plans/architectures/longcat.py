"""LongCat-Video: tiles of the frame, so that every rank has all frames.

Then one modulation row a frame, the conditioning frames (a prefix of each rank's tokens)
and the text that they do not get need no change. Conditioning frames reach the attention
override in place of a mask: one exchange of q, k and v serves both kinds of queries, and
cached keys and values are stored where they were attended to, behind the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...layout import SequenceLayout, TileLayout, choose_split
from ..forward_state import ForwardState
from ..plan import Attention, Blocks, HookPoint, SequencePlan
from ..shard_rules import by_frame, by_token


def _tiles(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    frames, height, width = arguments["transformer_options"]["grid_sizes"]
    return TileLayout((frames, height, width), choose_split(height, width, world_size))


def _for_rank(conditioning: Any, run: ForwardState) -> Any:
    """Which of the rank's own tokens are conditioning frames, and which of all in the order that attention sees."""
    layout = run.layout
    return conditioning.for_rank(torch.arange(layout.tokens)[layout.indices(run.rank)], layout.order(), layout.tokens)


def _attend_in_frames(module: nn.Module) -> Callable[..., Tensor]:
    return module.attend_in_frames  # type: ignore[return-value]


_ATTENTION = Attention("attn", mask_parameter="conditioning", mask_attention=_attend_in_frames)

LONGCAT_VIDEO = SequencePlan(
    architecture="LongCatVideoModel",
    # e: (B, 1 or F, E); freqs: (1, T, 1, D / 2, 2, 2)
    blocks=(Blocks("blocks", "x", (_ATTENTION,), {"e": by_frame(1), "freqs": by_token(1), "conditioning": _for_rank}),),
    # LayerNorm, modulation and the projection to 64 channels
    sites=(HookPoint("final_layer", {"e": by_frame(1)}, gather=True),),
    choose_layout=_tiles,
    after_run="clear_cache",
)
