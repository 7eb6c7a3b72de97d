"""Rules that cut one argument down to this rank's tokens, and one that puts outputs together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..comm import Transport
from ..errors import SPError
from ..layout import TileLayout

if TYPE_CHECKING:
    from .forward_state import ForwardState
    from .plan import Gather, ShardRule


def by_token(dim: int = 1) -> ShardRule:
    """One entry a token along ``dim``, or a single one for all."""

    def cut(value: Any, run: ForwardState) -> Any:
        if value is None or value.size(dim) == 1 != run.layout.tokens:
            return value
        return run.layout.shard(value, run.rank, dim)

    return cut


def item(index: int, rule: ShardRule) -> ShardRule:
    """Apply ``rule`` to one element of a tuple or list, leave the others."""

    def cut(value: Any, run: ForwardState) -> Any:
        if value is None:
            return value
        parts = list(value)
        parts[index] = rule(parts[index], run)
        return type(value)(parts)

    return cut


def frame_rows(tokens: int, rows: int) -> Tensor:
    """Row of each token when ``rows`` rows are stretched over ``tokens`` tokens, int64 (T,).

    As Wan stretches its per-frame modulation: equal runs, or runs one longer when it does
    not divide.
    """
    run = tokens // rows
    if run * rows != tokens:
        run += 1
    return torch.arange(tokens) // run


def by_frame(dim: int = 1) -> ShardRule:
    """One row a latent frame along ``dim``, stretched over the tokens inside the block by their local number.

    A tile keeps all frames with equally many tokens each, so the rows stay as they are. In
    any other layout a rank's first token is not the first of a frame: the rows are given to
    tokens before they are cut.
    """

    def cut(value: Any, run: ForwardState) -> Any:
        rows = value.size(dim)
        if rows == 1:
            return value
        layout = run.layout
        if isinstance(layout, TileLayout) and layout.grid[0] == rows and not layout.prefix and not layout.suffix:
            return value
        index = layout.shard(frame_rows(layout.tokens, rows), run.rank, 0)
        return value.index_select(dim, index.to(value.device))

    return cut


def rope_tables(value: Any, run: ForwardState) -> Any:
    """LTX's rotary embedding: a tuple of tables with one entry a token, and a flag.

    One table of rotations (B, T, H, D / 2, 2, 2), or cosines and sines apart, as hosts before
    0.21 make them: (B, H, T, D / 2) by halves of a head, (B, T, C) interleaved.
    """
    return tuple(by_token(2 if x.dim() == 4 else 1)(x, run) if isinstance(x, Tensor) else x for x in value)


def compressed_timestep(value: Any, run: ForwardState) -> Any:
    """LTX-AV's CompressedTimestep, in its three states, or a plain (B, T or 1, C) tensor."""
    if isinstance(value, Tensor) or value is None:
        return by_token(1)(value, run)
    rows, tokens = value.data.size(1), run.layout.tokens
    if value.patches_per_frame == 1:
        if rows == 1:
            return value
        return type(value)(run.layout.shard(value.data, run.rank, 1), None)
    if rows * value.patches_per_frame != tokens:
        raise SPError(f"{rows} frames of {value.patches_per_frame} tokens do not make the {tokens} tokens of the sequence")
    frames = run.layout.shard(torch.arange(tokens) // value.patches_per_frame, run.rank, 0)
    return _frame_indexed(type(value))(value, frames.to(value.data.device))


def _frame_indexed(base: type) -> type:
    """A CompressedTimestep that keeps one row a frame and looks rows up by token.

    Expanding before the cut would hold all modulation rows of every token for the whole
    forward (72 KB a token for LTX-2); this expands one parameter at a time, as the base does.
    """

    class FrameIndexedTimestep(base):  # type: ignore[misc, valid-type]
        __slots__ = ("frames",)

        def __init__(self, whole: Any, frames: Tensor) -> None:
            # not through the base's constructor, which differs between hosts and would compress what it is given
            own = {"num_frames": whole.data.size(1), "patches_per_frame": 1}
            for name in base.__slots__:  # type: ignore[attr-defined]
                setattr(self, name, own.get(name, getattr(whole, name)))
            self.frames = frames

        def expand(self) -> Tensor:
            return self.data.index_select(1, self.frames)

        def expand_for_computation(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            # patches_per_frame is 1, so the base computes one row a frame
            return tuple(rows.index_select(1, self.frames) for rows in super().expand_for_computation(*args, **kwargs))

    return FrameIndexedTimestep


# -- whole tokens (text) before the stream's ------------------------------------------------


def joint_by_token(dim: int = 1) -> ShardRule:
    """One entry a token along ``dim``, those of the whole tokens first; they stay."""

    def cut(value: Any, run: ForwardState) -> Any:
        text, own = value.tensor_split((run.whole_tokens,), dim)
        return torch.cat([text, run.shard(own, dim)], dim)

    return cut


# -- segments: (start, stop or None, row of a table) ------------------------------------------

Segment = tuple[int, "int | None", int]


def segments(value: Sequence[Segment], run: ForwardState) -> list[Segment]:
    """Segments that cover the stream's tokens in order, as those of this rank's tokens."""
    return _runs(run.shard(_rows(value, run.layout.tokens), 0))


def joint_segments(value: Sequence[Segment], run: ForwardState) -> list[Segment]:
    """The same where they count the whole tokens too, which stand first."""
    rows = _rows(value, run.whole_tokens + run.layout.tokens)
    return _runs(joint_by_token(0)(rows, run))


def _rows(value: Sequence[Segment], tokens: int) -> Tensor:
    """Row of each token, int64 (T,)."""
    rows = torch.full((tokens,), -1)
    for start, stop, row in value:
        rows[start:stop] = row
    return rows


def _runs(rows_t: Tensor) -> list[Segment]:
    rows, counts = rows_t.unique_consecutive(return_counts=True)
    stops = counts.cumsum(0)
    found = zip((stops - counts).tolist(), stops.tolist(), rows.tolist(), strict=True)
    return [(start, stop, row) for start, stop, row in found if row >= 0]


def segment(value: Segment, run: ForwardState) -> Segment:
    """This rank's part of one segment, in its own numbering; it may be empty."""
    start, stop, row = value
    own = _own_range(run, run.rank)
    # an empty part lies at the end of the rank's tokens: any place without tokens will do
    lower, upper = (min(max(edge, own.start), own.stop) - own.start for edge in (start, own.stop if stop is None else stop))
    return lower, upper, row


def gather_segments(*names: str) -> Gather:
    """Of a site that returns one (n, C) tensor for each of these segment arguments: all ranks' rows of each."""

    def gather(outputs: tuple[Tensor, ...], arguments: Mapping[str, Any], run: ForwardState, transport: Transport) -> Any:
        whole = []
        for rows_nC, name in zip(outputs, names, strict=True):
            start, stop, _ = arguments[name]
            ranges = [_own_range(run, rank) for rank in range(run.world_size)]
            counts = [max(0, min(stop, own.stop) - max(start, own.start)) for own in ranges]
            whole.append(transport.all_gather_tokens(rows_nC[None].contiguous(), counts)[0])
        return tuple(whole)

    return gather


def _own_range(run: ForwardState, rank: int) -> slice:
    indices = run.layout.indices(rank)
    if not isinstance(indices, slice):
        raise SPError("Tokens that lie in segments can only be shared flat; leave the layout of SP Model Patch at auto or flat")
    return indices
