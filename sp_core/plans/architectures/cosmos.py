"""Cosmos Predict 2 and Anima: blocks on a grid of tokens, with a timestep for all frames or one for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..forward_state import ForwardState
from ..plan import Attention, Blocks, HookPoint, SequencePlan
from ..shard_rules import by_frame, by_token


def _on_grid(value: Any, state: ForwardState) -> Any:
    """(B, F, H, W, C) to (B, t, 1, 1, C): this rank's tokens as the blocks get them."""
    return state.shard(value.flatten(1, 3), 1)[:, :, None, None]


# a rank's tokens are as many frames of one place each, so what is one row a frame becomes one a token
_PER_FRAME = {"emb_B_T_D": by_frame(1), "adaln_lora_B_T_3D": by_frame(1)}

COSMOS_PREDICT2 = SequencePlan(
    architecture="MiniTrainDIT",
    title="Cosmos Predict 2",
    covers="text and image to video, text to picture, per-frame timesteps",
    # rope: (1, T, 1, ...)
    blocks=(
        Blocks(
            "blocks",
            "x_B_T_H_W_D",
            (Attention("self_attn"),),
            {**_PER_FRAME, "rope_emb_L_1_1_D": by_token(1), "extra_per_block_pos_emb": _on_grid},
            dims=3,
        ),
    ),
    hook_points=(HookPoint("final_layer", _PER_FRAME, gather=True),),
)
# its adapter of the text is called outside the forward
ANIMA = replace(COSMOS_PREDICT2, architecture="Anima", title="Anima", covers="text to picture", weight_methods=("preprocess_text_embeds",))
