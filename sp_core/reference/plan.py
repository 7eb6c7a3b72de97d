"""The reference model's plan, as LTX-2's: the video is split, audio and text are replicated."""

from __future__ import annotations

from ..plans import Attention, Blocks, HookPoint, SequencePlan
from ..plans.shard_rules import by_token

REFERENCE = SequencePlan(
    architecture="AudioVideoDiT",
    title="Reference model",
    blocks=(
        Blocks(
            "blocks",
            "video",
            (Attention("video_self"), Attention("video_to_audio", "replicated_queries")),
            {"video_time": by_token(1), "video_rope": by_token(1)},
        ),
    ),
    hook_points=(HookPoint("video_head", {"time": by_token(1)}, gather=True),),
    forward="forward",
)
