"""HunyuanVideo and HunyuanVideo 1.5: text and video attend jointly, in double blocks and then in single blocks.

The video is split, the text (and its byT5 and picture tokens) is replicated. Token replace gives
the first frame a modulation of its own. A reference latent lies before the video and the model
drops it ahead of the last layer, so with one the tokens are gathered before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import nn

from ...errors import SPError
from ...layout import SequenceLayout, TileLayout
from ..plan import Attention, Blocks, HookPoint, Replicated, SequencePlan
from ..shard_rules import joint_by_token, joint_segments, segments

_JOINT = Attention(kind="joint")


def _has_reference(inputs: Mapping[str, Any]) -> bool:
    return inputs.get("ref_latent") is not None


def _tiles(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    sizes = arguments["input"].shape[2:]
    grid = tuple(size // step for size, step in zip(sizes, model.patch_size, strict=True))  # type: ignore[arg-type]
    if len(grid) != 3 or tokens < prod(grid):
        raise SPError(f"The {tokens} tokens are no video of {sizes}, so they cannot be tiled; leave the layout of SP Model Patch at auto")
    return TileLayout.over(grid, world_size, prefix=tokens - prod(grid))


HUNYUAN_VIDEO = SequencePlan(
    architecture="HunyuanVideo",
    strict=True,
    title="HunyuanVideo / 1.5",
    covers="text and image to video, token replace, reference latents, ControlNet; models built like it",
    # pe: (B, 1, N + T, D / 2, 2, 2), the N text tokens first; modulation_dims: (start, stop, row), in single blocks of [text | video]
    blocks=(
        Blocks("double_blocks", "img", (_JOINT,), {"pe": joint_by_token(2), "modulation_dims_img": segments}, replicated=Replicated("txt")),
        Blocks(
            "single_blocks",
            "x",
            (_JOINT,),
            {"pe": joint_by_token(2), "modulation_dims": joint_segments},
            replicated=Replicated(in_stream=True),
        ),
    ),
    hook_points=(HookPoint("final_layer", {"modulation_dims": segments}, gather=True),),
    tiles=_tiles,
    gather_early=_has_reference,
    # ControlNet: {"input": behind double blocks, "output": behind single blocks}
    residuals=("control",),
)
