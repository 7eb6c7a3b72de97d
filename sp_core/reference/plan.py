"""How the reference model is cut: as LTX-2 is, the video split, audio and text whole on every rank."""

from __future__ import annotations

from ..plans import Attention, Blocks, HookPoint, SequencePlan
from ..plans.shard_rules import by_token

REFERENCE = SequencePlan(
    architecture="AudioVideoDiT",
    blocks=(
        Blocks(
            "blocks",
            "video",
            (Attention("video_self"), Attention("video_to_audio", "from_stream")),
            {"video_time": by_token(1), "video_rope": by_token(1)},
        ),
    ),
    sites=(HookPoint("video_head", {"time": by_token(1)}, gather=True),),
    forward="forward",
)
