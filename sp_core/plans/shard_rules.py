"""Rules that take this rank's part of one argument, and one that puts outputs together.

A rule that one architecture needs stands in that architecture's file; a rule that two need stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import Transport
from ..errors import SPError
from ..layout import TileLayout
from .forward_state import ForwardState, Gather, ShardRule


def by_token(dim: int = 1) -> ShardRule:
    """For a tensor with one entry a token along ``dim``, or a single entry for all tokens."""

    def shard(value: Any, state: ForwardState) -> Any:
        if value is None or value.size(dim) == 1 != state.layout.tokens:
            return value
        return state.layout.shard(value, state.rank, dim)

    return shard


def item(index: int, rule: ShardRule) -> ShardRule:
    """For a tuple or list: apply ``rule`` to its element ``index`` and leave the others."""

    def shard(value: Any, state: ForwardState) -> Any:
        if value is None:
            return value
        parts = list(value)
        parts[index] = rule(parts[index], state)
        return type(value)(parts)

    return shard


def frame_rows(tokens: int, rows: int) -> Tensor:
    """Row of each token when ``rows`` rows are stretched over ``tokens`` tokens, int64 (T,).

    Wan stretches its per-frame modulation this way: each row serves equally many tokens, and one
    token more when the division leaves a rest.
    """
    tokens_per_row = tokens // rows
    if tokens_per_row * rows != tokens:
        tokens_per_row += 1
    return torch.arange(tokens) // tokens_per_row


def by_frame(dim: int = 1) -> ShardRule:
    """For a tensor with one row a latent frame along ``dim``, which the block stretches over the tokens that it has.

    A tile keeps all frames with equally many tokens each, so the rows stay as they are. In
    any other layout a rank's first token need not be the first of a frame. There each token gets
    its row first, and the rows are sharded as the tokens are.
    """

    def shard(value: Any, state: ForwardState) -> Any:
        rows = value.size(dim)
        if rows == 1:
            return value
        layout = state.layout
        if isinstance(layout, TileLayout) and layout.grid[0] == rows and not layout.prefix and not layout.suffix:
            return value
        index = layout.shard(frame_rows(layout.tokens, rows), state.rank, 0)
        return value.index_select(dim, index.to(value.device))

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
    return _frame_indexed(type(value))(value, frames.to(value.data.device))


def _frame_indexed(base: type) -> type:
    """A CompressedTimestep that keeps one row a frame and looks rows up by token.

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


# -- replicated tokens (text) before the stream's ------------------------------------------------


def joint_by_token(dim: int = 1) -> ShardRule:
    """For a tensor with one entry a token along ``dim``: first those of the replicated tokens, which stay, then the stream's."""

    def shard(value: Any, state: ForwardState) -> Any:
        text, own = value.tensor_split((state.replicated_tokens,), dim)
        return torch.cat([text, state.shard(own, dim)], dim)

    return shard


# -- segments: (start, stop or None, row of a table) ------------------------------------------

Segment = tuple[int, "int | None", int]


def segments(value: Sequence[Segment], state: ForwardState) -> list[Segment]:
    """Of segments that cover the stream's tokens in order: those of this rank's tokens, in its own numbering."""
    return _as_segments(state.shard(_rows(value, state.layout.tokens), 0))


def joint_segments(value: Sequence[Segment], state: ForwardState) -> list[Segment]:
    """As :func:`segments`, for segments that also count the replicated tokens, which stand first."""
    rows = _rows(value, state.replicated_tokens + state.layout.tokens)
    return _as_segments(joint_by_token(0)(rows, state))


def _rows(value: Sequence[Segment], tokens: int) -> Tensor:
    """Row of each token, int64 (T,)."""
    rows = torch.full((tokens,), -1)
    for start, stop, row in value:
        rows[start:stop] = row
    return rows


def _as_segments(rows_t: Tensor) -> list[Segment]:
    """Neighbouring tokens of one row as one segment; tokens without a row (-1) are in none."""
    rows, counts = rows_t.unique_consecutive(return_counts=True)
    stops = counts.cumsum(0)
    found = zip((stops - counts).tolist(), stops.tolist(), rows.tolist(), strict=True)
    return [(start, stop, row) for start, stop, row in found if row >= 0]


def segment(value: Segment, state: ForwardState) -> Segment:
    """This rank's part of one segment, in its own numbering; it may be empty."""
    start, stop, row = value
    own = _own_range(state, state.rank)
    # an empty part lies at the end of the rank's tokens: any place without tokens will do
    lower, upper = (min(max(edge, own.start), own.stop) - own.start for edge in (start, own.stop if stop is None else stop))
    return lower, upper, row


def gather_segments(*names: str) -> Gather:
    """For a hook point that returns one (n, C) tensor for each of these segment arguments: all ranks' rows of each.

    Raises:
        SPError: in a forward whose layout is not flat.
    """

    def gather(outputs: tuple[Tensor, ...], arguments: Mapping[str, Any], state: ForwardState, transport: Transport) -> Any:
        gathered = []
        for rows_nC, name in zip(outputs, names, strict=True):
            start, stop, _ = arguments[name]
            ranges = [_own_range(state, rank) for rank in range(state.world_size)]
            counts = [max(0, min(stop, own.stop) - max(start, own.start)) for own in ranges]
            gathered.append(transport.all_gather_tokens(rows_nC[None].contiguous(), counts)[0])
        return tuple(gathered)

    return gather


def _own_range(state: ForwardState, rank: int) -> slice:
    indices = state.layout.indices(rank)
    if not isinstance(indices, slice):
        raise SPError("Tokens that lie in segments can only be shared flat; leave the layout of SP Model Patch at auto or flat")
    return indices
