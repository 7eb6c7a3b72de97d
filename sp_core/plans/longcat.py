"""LongCat-Video: tiles of the frame, so that every rank has all frames.

Then one modulation row a frame, the conditioning frames (a prefix of each rank's tokens)
and the text that they do not get need no change. Conditioning frames reach the attention
override in place of a mask: one exchange of q, k and v serves both kinds of queries, and
cached keys and values are stored where they were attended to, behind the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..layout import SequenceLayout, TileLayout, choose_split
from .cuts import by_token
from .plan import Attention, SequencePlan, Site
from .run import Run


def _tiles(model: nn.Module, arguments: Mapping[str, Any], tokens: Tensor, world_size: int) -> SequenceLayout:
    frames, height, width = arguments["transformer_options"]["grid_sizes"]
    return TileLayout((frames, height, width), choose_split(height, width, world_size))


def _in_rank_order(conditioning: Any, run: Run) -> Any:
    """Attention sees the tokens tile after tile: each token's frame follows them."""
    return conditioning.in_order(run.layout.order(), run.layout.tokens)


def _attend_in_frames(module: nn.Module) -> Callable[..., Tensor]:
    return module.attend_in_frames  # type: ignore[return-value]


LONGCAT_VIDEO = SequencePlan(
    architecture="LongCatVideoModel",
    blocks="blocks",
    stream="x",
    # freqs: (1, T, 1, D / 2, 2, 2); e keeps its one row a frame
    cuts={"freqs": by_token(1), "conditioning": _in_rank_order},
    attentions=(Attention("attn", mask_parameter="conditioning", mask_attention=_attend_in_frames),),
    # LayerNorm, modulation and the projection to 64 channels
    sites=(Site("final_layer", gather=True),),
    choose_layout=_tiles,
    after_run="clear_cache",
)
