"""Stable Diffusion 3 and 3.5: text and picture attend jointly in every block, the text is replicated.

Blocks of SD3.5 medium attend once more, to the picture alone, in the same module.
"""

from __future__ import annotations

from ..plan import Attention, Blocks, HookPoint, Replicated, SequencePlan

SD3 = SequencePlan(
    architecture="OpenAISignatureMMDITWrapper",
    title="Stable Diffusion 3 / 3.5",
    covers="text to picture, ControlNets",
    # positions are added to the tokens before the blocks
    blocks=(
        Blocks(
            "joint_blocks",
            "x",
            (Attention(kind="joint", heads_of="x_block.attn"),),
            replicated=Replicated("context", returned_first=True),
            parameters=("context", "x"),
        ),
    ),
    hook_points=(HookPoint("final_layer", gather=True),),
    # ControlNet: {"output": behind blocks}
    residuals=("control",),
    forward="forward",
)
