"""CogVideoX: text and video attend jointly in every block, the text is replicated."""

from __future__ import annotations

from typing import Any

from ..forward_state import ForwardState
from ..plan import Attention, Blocks, HookPoint, Replicated, SequencePlan


def _rotary(value: Any, state: ForwardState) -> Any:
    """(cos, sin), each (T, head_dim) of the video's tokens."""
    return None if value is None else tuple(state.shard(table, 0) for table in value)


COGVIDEOX = SequencePlan(
    architecture="CogVideoXTransformer3DModel",
    title="CogVideoX",
    covers="text to video",
    blocks=(
        Blocks(
            "blocks",
            "hidden_states",
            (Attention(kind="joint"),),
            {"image_rotary_emb": _rotary},
            replicated=Replicated("encoder_hidden_states"),
        ),
    ),
    hook_points=(HookPoint("proj_out", gather=True),),
)
