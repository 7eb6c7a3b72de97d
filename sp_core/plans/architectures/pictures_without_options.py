"""Picture models whose attention hands no transformer options on: ErnieImage, PixArt and Hunyuan DiT."""

from __future__ import annotations

from torch import Tensor

from ..forward_state import ForwardState
from ..plan import Attention, Blocks, HookPoint, SequencePlan
from ..shard_rules import by_token

_FUNCTION = "optimized_attention"


def _cos_and_sin(value: tuple[Tensor, Tensor], state: ForwardState) -> tuple[Tensor, ...]:
    """Of (T, D) each, this rank's."""
    return tuple(state.shard(part, 0) for part in value)


ERNIE_IMAGE = SequencePlan(
    architecture="ErnieImageModel",
    title="ErnieImage",
    covers="text to picture",
    # one sequence of picture and text, all of which is split; rotary_pos_emb: (B, T, 1, D, 2, 2)
    blocks=(Blocks("layers", "x", (Attention("self_attention", function=_FUNCTION),), {"rotary_pos_emb": by_token(1)}),),
    hook_points=(HookPoint("final_linear", gather=True),),
    forward="forward",
)
PIXART = SequencePlan(
    architecture="PixArtMS",
    title="PixArt",
    covers="text to picture, alpha and sigma",
    # positions are added to the tokens before the blocks
    blocks=(Blocks("blocks", "x", (Attention("attn", function=_FUNCTION),)),),
    hook_points=(HookPoint("final_layer", gather=True),),
    forward="forward",
)
HUNYUAN_DIT = SequencePlan(
    architecture="HunYuanDiT",
    title="Hunyuan DiT",
    covers="text to picture, ControlNets",
    # skip: tokens of an earlier block, which are this rank's already
    blocks=(Blocks("blocks", "x", (Attention("attn1", function=_FUNCTION),), {"freq_cis_img": _cos_and_sin}),),
    hook_points=(HookPoint("final_layer", gather=True),),
    residuals=("control",),
    forward="forward",
)

WITHOUT_OPTIONS = (ERNIE_IMAGE, PIXART, HUNYUAN_DIT)
