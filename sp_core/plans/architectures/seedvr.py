"""SeedVR2: tokens of all videos of a batch in one sequence without a batch, (T, C), and attention to windows of each video and the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...comm import Transport
from ..forward_state import ForwardState
from ..plan import Attention, Blocks, HookPoint, OwnHeads, SequencePlan


def _own_lengths(cache: Any, state: ForwardState) -> Any:
    """The model's notes of one forward, where it looks up how many tokens each video has, to repeat its modulation: of this rank's.

    Raises:
        ValueError: the notes do not tell how many videos there are.
    """
    sizes = cache.cache.get("patch.vid_shape_before_patchify")
    if sizes is None or state.layout.tokens % len(sizes):
        raise ValueError("the model keeps no notes of its videos' sizes")
    video = torch.arange(state.layout.tokens) // (state.layout.tokens // len(sizes))
    cache.cache["vid_len"] = torch.bincount(state.shard(video, 0), minlength=len(sizes)).to(sizes.device)
    return cache


def _all_tokens(output_tC: Tensor, arguments: Mapping[str, Any], state: ForwardState, transport: Transport) -> Tensor:
    return state.layout.restore(transport.all_gather_tokens(output_tC[None].contiguous(), state.layout.counts), 1)[0]


def _replaced(inputs: Mapping[str, Any]) -> str:
    replaced = (inputs.get("transformer_options") or {}).get("patches_replace") or {}
    return "with a replaced block" if replaced.get("dit") else ""


SEEDVR2 = SequencePlan(
    architecture="NaDiT",
    title="SeedVR2",
    covers="upscaling of pictures and videos",
    blocks=(
        Blocks(
            "blocks",
            "vid",
            (Attention("attn", kind="joint", own_heads=OwnHeads("proj_qkv", "proj_out", "heads")),),
            {"cache": _own_lengths},
            dim=0,
        ),
    ),
    # behind it the model puts its tokens back on their grid
    hook_points=(HookPoint("vid_out.proj", gather=_all_tokens),),
    rows_where=_replaced,
    forward="forward",
)
