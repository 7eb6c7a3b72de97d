"""Rules that take this rank's part of one argument, for plans in more than one file.

A rule that a single file of ``architectures/`` uses lies in that file, or in one of its own here (:mod:`.ltx_arguments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import SPError
from ..layout import TileLayout
from .forward_state import ForwardState, ShardRule


def by_token(dim: int = 1) -> ShardRule:
    """For a tensor with one entry a token along ``dim``, or a single entry for all tokens."""

    def shard(value: Any, state: ForwardState) -> Any:
        if value is None or value.size(dim) == 1 != state.layout.tokens:
            return value
        return state.layout.shard(value, state.rank, dim)

    return shard


def first_tokens(value: int, state: ForwardState) -> int:
    """For a number of tokens, the sequence's first ones: how many of them are this rank's.

    Raises:
        SPError: in a layout that is not flat, where these need not be the rank's first ones.
    """
    own = state.layout.indices(state.rank)
    if not isinstance(own, slice):
        raise SPError("The first tokens of a sequence can only be told apart flat; leave the layout of SP Model Patch at auto or flat")
    return min(max(value, own.start), own.stop) - own.start


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


# -- segments: (start, stop or None, row of a table) ------------------------------------------

Segment = tuple[int, "int | None", int]


def segments(value: Sequence[Segment], state: ForwardState) -> list[Segment]:
    """Of segments that cover the stream's tokens in order: those of this rank's tokens, in its own numbering."""
    return as_segments(state.shard(segment_rows(value, state.layout.tokens), 0))


def joint_by_token(dim: int = 1) -> ShardRule:
    """For a tensor with one entry a token along ``dim``: those of the replicated tokens, which stay, beside the stream's."""

    def shard(value: Any, state: ForwardState) -> Any:
        replicated, all_tokens = state.parted(value, dim, state.replicated_tokens)
        return state.together(replicated, state.shard(all_tokens, dim), dim)

    return shard


def joint_segments(value: Sequence[Segment], state: ForwardState) -> list[Segment]:
    """As :func:`segments`, for segments that also count the replicated tokens, which stand first."""
    rows = segment_rows(value, state.replicated_tokens + state.layout.tokens)
    return as_segments(joint_by_token(0)(rows, state))


def segment_rows(value: Sequence[Segment], tokens: int) -> Tensor:
    """Row of each token, int64 (T,); -1 for a token in no segment."""
    rows = torch.full((tokens,), -1)
    for start, stop, row in value:
        rows[start:stop] = row
    return rows


def as_segments(rows_t: Tensor) -> list[Segment]:
    """Neighbouring tokens of one row as one segment; tokens without a row (-1) are in none."""
    rows, counts = rows_t.unique_consecutive(return_counts=True)
    stops = counts.cumsum(0)
    found = zip((stops - counts).tolist(), stops.tolist(), rows.tolist(), strict=True)
    return [(start, stop, row) for start, stop, row in found if row >= 0]
