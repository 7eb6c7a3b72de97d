"""LongCat-Video and its Avatar: tiles of the frame, so that every rank has all frames.

With tiles the model's own code is right on a rank's tokens: one modulation row a frame, the
conditioning frames as a prefix of the tokens, the text and the sound that they do not get, and each
frame's own sound. What frames attend to reaches the attention override in place of a mask
(:mod:`..frame_conditioning`): one exchange of q, k and v serves all kinds of queries, and cached
keys and values are stored where they were attended to, behind the exchange. How much a token looks
at each person comes back with the attention's output; only the extremes of that are joined besides.
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


def _largest(of_each_rank: Tensor) -> Tensor:
    """(B, world_size, C) -> (B, 1, C)."""
    return of_each_rank.amax(1, keepdim=True)


_ATTENTION = Attention("attn", mask=MaskRule("conditioning", "conditioning", _attend_in_frames))

# e: (B, 1 or F, E); freqs: (1, T, 1, D / 2, 2, 2)
_SHARD = {"e": by_frame(1), "freqs": by_token(1), "conditioning": _for_rank}
# LayerNorm, modulation and the projection to 64 channels
_HOOK_POINTS = (HookPoint("final_layer", {"e": by_frame(1)}, gather=True),)

LONGCAT_VIDEO = SequencePlan(
    architecture="LongCatVideoModel",
    strict=True,
    title="LongCat-Video",
    covers="text and image to video, continuation, refining with block-sparse attention; this extension brings the model along",
    blocks=(Blocks("blocks", "x", (_ATTENTION,), _SHARD),),
    hook_points=_HOOK_POINTS,
    choose_layout=_tiles,
    after_run="clear_cache",
)

LONGCAT_AVATAR = SequencePlan(
    architecture="LongCatAvatarModel",
    strict=True,
    title="LongCat-Video-Avatar",
    covers="1.0 and 1.5: sound, picture and continuation to video, one and several persons; this extension brings the model along",
    blocks=(Blocks("blocks", "x", (_ATTENTION,), _SHARD, joined={"audio_cross_attn.extremes": _largest}),),
    hook_points=_HOOK_POINTS,
    choose_layout=_tiles,
    tiles=_tiles,
    # each frame hears its own sound
    only_tiles=True,
    after_run="clear_cache",
)
