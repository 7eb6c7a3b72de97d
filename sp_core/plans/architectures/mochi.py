"""Mochi: video and text attend jointly in every block, the text is replicated and stands behind the video."""

from __future__ import annotations

from ..plan import Attention, Blocks, HookPoint, Replicated, SequencePlan
from ..shard_rules import by_token

MOCHI = SequencePlan(
    architecture="AsymmDiTJoint",
    title="Mochi",
    covers="text to video",
    # rope_cos, rope_sin: (T, H, D / 2)
    blocks=(
        Blocks(
            "blocks",
            "x",
            (Attention("attn", kind="joint"),),
            {"rope_cos": by_token(0), "rope_sin": by_token(0)},
            replicated=Replicated("y", behind=True),
        ),
    ),
    hook_points=(HookPoint("final_layer", gather=True),),
    forward="forward",
)
