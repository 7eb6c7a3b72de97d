"""LongCat-Video: tiles of the frame, so that every rank has all frames.

With tiles the model's own code is right on a rank's tokens: one modulation row a frame, the
conditioning frames as a prefix of the tokens, and the text that they do not get. Conditioning
frames reach the attention override in place of a mask (:mod:`..frame_conditioning`): one
exchange of q, k and v serves both kinds of queries, and cached keys and values are stored where
they were attended to, behind the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...layout import SequenceLayout, TileLayout
from ..forward_state import ForwardState
from ..frame_conditioning import FrameAttention, FrameConditioning
from ..host_functions import HostFunctions
from ..plan import Attention, Blocks, HookPoint, MaskRule, SequencePlan
from ..shard_rules import by_frame, by_token


def _tiles(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    return TileLayout.over(arguments["transformer_options"]["grid_sizes"], world_size)


def _for_rank(conditioning: FrameConditioning, state: ForwardState) -> FrameConditioning:
    """Which of the rank's own tokens are conditioning frames, and which of all in the order that attention sees."""
    layout = state.layout
    return conditioning.for_rank(torch.arange(layout.tokens)[layout.indices(state.rank)], layout.order(), layout.tokens)


def _attend_in_frames(module: nn.Module, host: HostFunctions) -> Callable[..., Tensor]:
    return cast(FrameAttention, module).attend_in_frames


_ATTENTION = Attention("attn", mask=MaskRule("conditioning", "conditioning", _attend_in_frames))

LONGCAT_VIDEO = SequencePlan(
    architecture="LongCatVideoModel",
    strict=True,
    title="LongCat-Video",
    covers="text and image to video, continuation, cached conditioning frames; this extension brings the model along",
    # e: (B, 1 or F, E); freqs: (1, T, 1, D / 2, 2, 2)
    blocks=(Blocks("blocks", "x", (_ATTENTION,), {"e": by_frame(1), "freqs": by_token(1), "conditioning": _for_rank}),),
    # LayerNorm, modulation and the projection to 64 channels
    hook_points=(HookPoint("final_layer", {"e": by_frame(1)}, gather=True),),
    choose_layout=_tiles,
    after_run="clear_cache",
)
