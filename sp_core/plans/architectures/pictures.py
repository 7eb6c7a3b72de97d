"""Further picture models: one sequence of text and picture, or text that is replicated beside the picture.

Ideogram 4 and Krea 2 have one sequence, all of which is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..plan import Attention, Blocks, HookPoint, Replicated, SequencePlan
from ..shard_rules import by_token, first_tokens, joint_by_token
from .qwen_image import QWEN_IMAGE

# the same blocks on raw places of the latent
MAGE_FLOW = replace(QWEN_IMAGE, architecture="MageFlowTransformer2DModel", title="Mage-Flow", covers="text to picture, reference latents")

IDEOGRAM4 = SequencePlan(
    architecture="Ideogram4Transformer2DModel",
    title="Ideogram 4",
    covers="text to picture",
    # freqs_cis: (1, T, 1, D / 2, 2, 2)
    blocks=(Blocks("layers", "x", (Attention("attention"),), {"freqs_cis": by_token(1)}),),
    hook_points=(HookPoint("final_layer", gather=True),),
)


def _rows_of_krea2(inputs: Mapping[str, Any]) -> str:
    """The model tells such a patch which of all tokens are the picture's, and a rank's tokens have other numbers (ComfyUI's NAGuidance)."""
    patches = (inputs.get("transformer_options") or {}).get("patches") or {}
    return (
        "with a patch on the attention's output, which is told the places of the picture's tokens"
        if "attn1_output_patch" in patches
        else ""
    )


KREA2 = SequencePlan(
    architecture="SingleStreamDiT",
    title="Krea 2",
    covers="text to picture, reference latents",
    rows_where=_rows_of_krea2,
    # freqs: (B, 1, T, D / 2, 2, 2); from timestep_zero_index on tokens have a timestep of their own
    blocks=(Blocks("blocks", "x", (Attention("attn"),), {"freqs": by_token(2), "timestep_zero_index": first_tokens}),),
    hook_points=(HookPoint("last", gather=True),),
)
JOY_IMAGE = SequencePlan(
    architecture="JoyImageTransformer3DModel",
    title="JoyImage",
    covers="text to picture, reference latents",
    blocks=(
        Blocks(
            "double_blocks",
            "hidden_states",
            (Attention("attn", kind="joint"),),
            # of the picture's tokens alone
            {"image_rotary_emb": by_token(1)},
            replicated=Replicated("encoder_hidden_states", behind=True),
        ),
    ),
    hook_points=(),
    # behind the blocks the model takes the reference latents away
    gather_early=lambda inputs: True,
)
LENS = SequencePlan(
    architecture="LensTransformer2DModel",
    title="Lens",
    covers="text to picture, ControlNets",
    blocks=(
        Blocks(
            "transformer_blocks",
            "hidden_states",
            (Attention("attn", kind="joint"),),
            {"freqs_cis": joint_by_token(2), "attention_mask": joint_by_token(3)},
            replicated=Replicated("encoder_hidden_states", returned_first=True, behind=True),
        ),
    ),
    hook_points=(HookPoint("proj_out", gather=True),),
    between=("double_block",),
    residuals=("control",),
)
