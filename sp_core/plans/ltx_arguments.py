"""Shard rules for the arguments of LTX-Video and LTX-2: rotary tables, and timesteps that are compressed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..errors import SPError
from .forward_state import ForwardState, ShardRule
from .shard_rules import by_token


def item(index: int, rule: ShardRule) -> ShardRule:
    """For a tuple or list: apply ``rule`` to its element ``index`` and leave the others."""

    def shard(value: Any, state: ForwardState) -> Any:
        if value is None:
            return value
        parts = list(value)
        parts[index] = rule(parts[index], state)
        return type(value)(parts)

    return shard


def rope_tables(value: Any, state: ForwardState) -> Any:
    """LTX's rotary embedding: a tuple of tables with one entry a token, and a flag.

    The table holds rotations (B, T, H, D / 2, 2, 2). ComfyUI before 0.21 has cosines and sines in
    tables of their own: (B, H, T, D / 2) by halves of a head, (B, T, C) interleaved.
    """
    return tuple(by_token(2 if x.dim() == 4 else 1)(x, state) if isinstance(x, Tensor) else x for x in value)


def compressed_timestep(value: Any, state: ForwardState) -> Any:
    """LTX-2's CompressedTimestep in its three states (a row a frame, a row a token, one row), or a plain (B, T or 1, C) tensor.

    Raises:
        SPError: the frames do not make up the tokens.
    """
    if isinstance(value, Tensor) or value is None:
        return by_token(1)(value, state)
    rows, tokens = value.data.size(1), state.layout.tokens
    if value.patches_per_frame == 1:
        if rows == 1:
            return value
        return type(value)(state.layout.shard(value.data, state.rank, 1), None)
    if rows * value.patches_per_frame != tokens:
        raise SPError(f"{rows} frames of {value.patches_per_frame} tokens do not make the {tokens} tokens of the sequence")
    frames = state.layout.shard(torch.arange(tokens) // value.patches_per_frame, state.rank, 0)
    return _frame_indexed(type(value))(value, frames.to(value.data.device))  # type: ignore[arg-type]


@functools.cache
def _frame_indexed(base: type) -> type:
    """A CompressedTimestep that keeps one row a frame and looks rows up by token. Made once, for another class is another graph to torch.

    If the rows were expanded before they are sharded, every token's rows would be held for the length
    of the forward (72 KB a token for LTX-2). This class expands one parameter at a time, as its base does.
    """

    class FrameIndexedTimestep(base):  # type: ignore[misc, valid-type]
        __slots__ = ("frames",)

        def __init__(self, compressed: Any, frames: Tensor) -> None:
            # the base's constructor is not called: it differs between versions of ComfyUI, and would compress again
            own = {"num_frames": compressed.data.size(1), "patches_per_frame": 1}
            for name in base.__slots__:  # type: ignore[attr-defined]
                setattr(self, name, own.get(name, getattr(compressed, name)))
            self.frames = frames

        def expand(self) -> Tensor:
            return self.data.index_select(1, self.frames)

        def expand_for_computation(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            # patches_per_frame is 1, so the base computes one row a frame
            return tuple(rows.index_select(1, self.frames) for rows in super().expand_for_computation(*args, **kwargs))

    return FrameIndexedTimestep
