"""Qwen-Image, with its editing and layered models: text and picture attend jointly in every block, the text is replicated.

Reference latents lie behind the picture. They can have a timestep of their own, from a token on that the blocks are told.
"""

from __future__ import annotations

from ..plan import Attention, Blocks, HookPoint, Replicated, SequencePlan
from ..shard_rules import first_tokens, joint_by_token

QWEN_IMAGE = SequencePlan(
    architecture="QwenImageTransformer2DModel",
    title="Qwen-Image",
    covers="text to picture, Qwen-Image-Edit with reference latents, layers, ControlNets",
    # image_rotary_emb: (B, 1, N + T, D / 2, 2, 2), the N text tokens first
    blocks=(
        Blocks(
            "transformer_blocks",
            "hidden_states",
            (Attention("attn", kind="joint"),),
            {"image_rotary_emb": joint_by_token(2), "timestep_zero_index": first_tokens},
            replicated=Replicated("encoder_hidden_states", returned_first=True),
        ),
    ),
    hook_points=(HookPoint("proj_out", gather=True),),
    between=("double_block",),
    residuals=("control",),
)
