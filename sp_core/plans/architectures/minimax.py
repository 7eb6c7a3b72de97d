"""MiniMax-H3: one packed sequence of text, conditions or references, audio and video, split as it is.

Every segment has a modulation row of its own; the last layer takes the audio and video segments
out of the sequence, so each rank gives its part of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...comm import Transport
from ...errors import SPError
from ..forward_state import ForwardState, Gather
from ..plan import Attention, Blocks, HookPoint, SequencePlan
from ..shard_rules import Segment, by_token, segments


def segment(value: Segment, state: ForwardState) -> Segment:
    """This rank's part of one segment, in its own numbering; it may be empty."""
    start, stop, row = value
    own = _own_range(state, state.rank)
    # an empty part lies at the end of the rank's tokens: any place without tokens will do
    lower, upper = (min(max(edge, own.start), own.stop) - own.start for edge in (start, own.stop if stop is None else stop))
    return lower, upper, row


def gather_segments(*names: str) -> Gather:
    """For a hook point that returns one (n, C) tensor for each of these segment arguments: all ranks' rows of each.

    Raises:
        SPError: in a forward whose layout is not flat.
    """

    def gather(outputs: tuple[Tensor, ...], arguments: Mapping[str, Any], state: ForwardState, transport: Transport) -> Any:
        gathered = []
        for rows_nC, name in zip(outputs, names, strict=True):
            start, stop, _ = arguments[name]
            ranges = [_own_range(state, rank) for rank in range(state.world_size)]
            counts = [max(0, min(stop, own.stop) - max(start, own.start)) for own in ranges]
            gathered.append(transport.all_gather_tokens(rows_nC[None].contiguous(), counts)[0])
        return tuple(gathered)

    return gather


def _own_range(state: ForwardState, rank: int) -> slice:
    indices = state.layout.indices(rank)
    if not isinstance(indices, slice):
        raise SPError("Tokens that lie in segments can only be shared flat; leave the layout of SP Model Patch at auto or flat")
    return indices


def _without_layout(payload: dict[str, Any]) -> dict[str, Any]:
    """The payload without its packed layout, which is an object; the model makes it anew from the rest of the payload."""
    return {key: value for key, value in payload.items() if key != "layout"}


MINIMAX_H3 = SequencePlan(
    architecture="MiniMaxH3Model",
    strict=True,
    title="MiniMax H3",
    covers="text to video with sound, keyframes, references",
    # x: (T, C); mod_segments: (start, stop, row); rope_freqs: (1, T, 1, D / 2, 2, 2)
    blocks=(Blocks("blocks", "x", (Attention("attn"),), {"mod_segments": segments, "rope_freqs": by_token(1)}, dim=0),),
    hook_points=(HookPoint("final_layer", {"video_seg": segment, "audio_seg": segment}, gather=gather_segments("video_seg", "audio_seg")),),
    to_plain={"minimax_payload": _without_layout},
    # text refiner: called once for each conditioning, outside the forward
    weight_methods=("preprocess_text_embeds",),
)
