"""MiniMax-H3: one packed sequence of text, conditions or references, audio and video, split as it is.

Every segment has a modulation row of its own; the last layer takes the audio and video segments
out of the sequence, so each rank gives its part of both.
"""

from __future__ import annotations

from typing import Any

from ..plan import Attention, Blocks, HookPoint, SequencePlan
from ..shard_rules import by_token, gather_segments, segment, segments


def _without_layout(payload: dict[str, Any]) -> dict[str, Any]:
    """The payload without its packed layout, which is an object; the model makes it anew from the rest of the payload."""
    return {key: value for key, value in payload.items() if key != "layout"}


MINIMAX_H3 = SequencePlan(
    architecture="MiniMaxH3Model",
    title="MiniMax H3",
    covers="text to video with sound, keyframes, references",
    # x: (T, C); mod_segments: (start, stop, row); rope_freqs: (1, T, 1, D / 2, 2, 2)
    blocks=(Blocks("blocks", "x", (Attention("attn"),), {"mod_segments": segments, "rope_freqs": by_token(1)}, dim=0),),
    hook_points=(HookPoint("final_layer", {"video_seg": segment, "audio_seg": segment}, gather=gather_segments("video_seg", "audio_seg")),),
    to_plain={"minimax_payload": _without_layout},
    # text refiner: called once for each conditioning, outside the forward
    weight_methods=("preprocess_text_embeds",),
)
