"""Cosmos: blocks on a grid of tokens. Predict 2 and Anima have one timestep or one a frame; Cosmos 1 has its batch behind the grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...comm import Transport
from ..forward_state import ForwardState
from ..plan import Attention, Blocks, HookPoint, SequencePlan, SplitBehind
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


def _grid_first(value: Tensor, state: ForwardState) -> Tensor:
    """(F, H, W, B, C) to (t, 1, 1, B, C)."""
    return state.shard(value.flatten(0, 2), 0)[:, None, None]


def _videos_one_by_one(output: Tensor, arguments: Mapping[str, Any], state: ForwardState, transport: Transport) -> Tensor:
    """(B t, 1, C) to (B T, 1, C)."""
    own = output.unflatten(0, (-1, state.layout.counts[state.rank])).contiguous()
    return state.layout.restore(transport.all_gather_tokens(own, state.layout.counts), 1).flatten(0, 1)


_POSITIONS = "extra_pos_emb_B_T_H_W_D_or_T_H_W_B_D"
COSMOS1 = SequencePlan(
    architecture="GeneralDIT",
    title="Cosmos 1",
    covers="text and image to video",
    # the model adds positions to the tokens before each block; rope: (T, D / 2, 2, 2)
    split_behind=SplitBehind("forward_before_blocks", "x", {_POSITIONS: _grid_first, "rope_emb_L_1_1_D": by_token(0)}),
    blocks=(Blocks("blocks", "x", (Attention("blocks.0.block.attn"),), dim=0, dims=3),),
    hook_points=(HookPoint("final_layer", gather=_videos_one_by_one),),
)
