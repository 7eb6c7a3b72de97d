"""Omnigen 2 and Boogu: blocks for the picture, blocks for its reference latents, and then for one sequence of text and both.

Each sequence is split, one after the other. Boogu has double blocks before the last ones: text and picture attend jointly, and
the picture once more alone.
"""

from __future__ import annotations

from dataclasses import replace

from ..plan import Attention, Blocks, HookPoint, Replicated, SequencePlan
from ..shard_rules import by_token, joint_by_token

_SELF = (Attention("attn"),)
# image_rotary_emb: (B, T, 1, D / 2, 2, 2)
_ROTARY = {"image_rotary_emb": by_token(1)}
_REFINERS = (
    Blocks("noise_refiner", "hidden_states", _SELF, _ROTARY, gathers=True),
    Blocks("ref_image_refiner", "hidden_states", _SELF, _ROTARY, gathers=True),
)
OMNIGEN2 = SequencePlan(
    architecture="OmniGen2Transformer2DModel",
    title="Omnigen 2",
    covers="text to picture, reference latents",
    blocks=(*_REFINERS, Blocks("layers", "hidden_states", _SELF, _ROTARY)),
    hook_points=(HookPoint("norm_out", gather=True),),
    forward="forward",
)
BOOGU = replace(
    OMNIGEN2,
    architecture="BooguTransformer2DModel",
    title="Boogu",
    blocks=(
        *_REFINERS,
        Blocks(
            "double_stream_layers",
            "img_hidden_states",
            (Attention("img_instruct_attn", kind="joint"), Attention("img_self_attn")),
            {"joint_rotary_emb": joint_by_token(1), "img_rotary_emb": by_token(1)},
            replicated=Replicated("instruct_hidden_states"),
            gathers=True,
        ),
        Blocks("single_stream_layers", "hidden_states", _SELF, _ROTARY),
    ),
)
