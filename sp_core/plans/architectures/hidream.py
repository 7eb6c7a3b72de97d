"""HiDream and AuraFlow: text and picture attend jointly, in double blocks and then in single blocks.

HiDream has the text behind the picture, and each of its blocks gets a layer of its text encoder beside.
"""

from __future__ import annotations

from ..plan import Attention, Blocks, HookPoint, Replicated, SequencePlan
from ..shard_rules import joint_by_token

_HIDREAM = (Attention("block.attn1", kind="joint"),)
_ROPE = {"rope": joint_by_token(1)}
HIDREAM = SequencePlan(
    architecture="HiDreamImageTransformer2DModel",
    title="HiDream",
    covers="text to picture, HiDream-E1",
    # rope: (B, T + N, 1, D / 2, 2, 2)
    blocks=(
        Blocks("double_stream_blocks", "image_tokens", _HIDREAM, _ROPE, replicated=Replicated("text_tokens", behind=True)),
        Blocks("single_stream_blocks", "image_tokens", _HIDREAM, _ROPE, replicated=Replicated(in_stream=True, behind=True)),
    ),
    hook_points=(HookPoint("final_layer", gather=True),),
)
_AURA = (Attention("attn", kind="joint"),)
AURA_FLOW = SequencePlan(
    architecture="MMDiT",
    title="AuraFlow",
    covers="text to picture",
    # positions are added to the tokens before the blocks
    blocks=(
        Blocks("double_layers", "x", _AURA, replicated=Replicated("c", returned_first=True)),
        Blocks("single_layers", "cx", _AURA, replicated=Replicated(in_stream=True)),
    ),
    hook_points=(HookPoint("final_linear", gather=True),),
)
