"""Shard rules of block arguments: what each rank gets, put together, is what one device would have had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_core.errors import SPError
from sp_core.layout import FlatLayout, SequenceLayout, TileLayout
from sp_core.plans.forward_state import ForwardState
from sp_core.plans.ltx_arguments import compressed_timestep, item, rope_tables
from sp_core.plans.shard_rules import by_frame, by_token, frame_rows


def states(layout: SequenceLayout) -> list[ForwardState]:
    made = [ForwardState(rank, layout.world_size) for rank in range(layout.world_size)]
    for state in made:
        state.split_by(layout)
    return made


def together(layout: SequenceLayout, parts: list[Tensor], dim: int = 1) -> Tensor:
    return layout.restore(torch.cat(parts, dim), dim)


def stretched(rows_BFC: Tensor, tokens: int) -> Tensor:
    """Wan's own rule for giving frames' rows to tokens, as its blocks apply it to what they are given."""
    repeats = tokens // rows_BFC.size(1) if rows_BFC.size(1) > 1 else 1
    if repeats == 1:
        return rows_BFC
    if repeats * rows_BFC.size(1) == tokens:
        return torch.repeat_interleave(rows_BFC, repeats, dim=1)
    return torch.repeat_interleave(rows_BFC, repeats + 1, dim=1)[:, :tokens]


LAYOUTS = [
    FlatLayout(30, 2),
    FlatLayout(31, 4),
    FlatLayout(7, 7),
    TileLayout.over((3, 5, 7), 4),
    TileLayout((3, 5, 7), (2, 1), prefix=3, suffix=4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_by_token(layout: SequenceLayout, dim: int) -> None:
    value = torch.randn([layout.tokens if other == dim else 3 for other in range(3)])
    parts = [by_token(dim)(value, state) for state in states(layout)]
    assert torch.equal(together(layout, parts, dim), value)


def test_one_row_for_all_tokens_is_left() -> None:
    value = torch.randn(2, 1, 4)
    [state, _] = states(FlatLayout(10, 2))
    assert by_token(1)(value, state) is value
    assert by_token(1)(None, state) is None
    assert by_frame(1)(value, state) is value


def test_a_wrong_number_of_tokens_is_no_quiet_mistake() -> None:
    [state, _] = states(FlatLayout(10, 2))
    with pytest.raises(ValueError, match="10 tokens"):
        by_token(1)(torch.randn(1, 9, 2), state)


@settings(max_examples=80, deadline=None)
@given(frames=st.integers(2, 6), height=st.integers(1, 5), width=st.integers(1, 5), world=st.integers(1, 5), tiled=st.booleans())
def test_by_frame_gives_every_token_its_own_frame(frames: int, height: int, width: int, world: int, tiled: bool) -> None:
    tokens = frames * height * width
    layout: SequenceLayout = TileLayout.over((frames, height, width), world) if tiled else FlatLayout(tokens, world)
    assume(0 not in layout.counts)
    rows = torch.arange(frames * 2.0).view(1, frames, 2)
    expected = stretched(rows, tokens)
    parts = [stretched(by_frame(1)(rows, state), layout.counts[state.rank]) for state in states(layout)]
    assert torch.equal(together(layout, parts), expected.expand(1, tokens, 2))


def test_what_by_frame_is_for() -> None:
    """Left alone in a flat split, Wan's rule gives most tokens another frame's row, without an error."""
    layout, rows = FlatLayout(4 * 6, 2), torch.arange(4.0).view(1, 4, 1)
    naive = together(layout, [stretched(rows, count) for count in layout.counts])
    assert (naive != stretched(rows, 24)).float().mean() == 0.75


def test_frames_that_do_not_divide_are_stretched_as_wan_does() -> None:
    rows = torch.arange(3.0).view(1, 3, 1)
    assert torch.equal(rows[:, frame_rows(11, 3)], stretched(rows, 11))


@pytest.mark.parametrize("shape", [(2, 7, 3, 4, 2, 2), (2, 3, 7, 4), (2, 7, 12)], ids=["rotations", "halves", "interleaved"])
def test_rope_tables(shape: tuple[int, ...]) -> None:
    """As hosts make them: one table of rotations and a flag, or cosines, sines and a flag."""
    layout, tables = FlatLayout(7, 3), (torch.randn(shape), torch.randn(shape))
    parts = [rope_tables((*tables, True), state) for state in states(layout)]
    assert all(isinstance(part, tuple) and part[-1] is True for part in parts)
    for number, table in enumerate(tables):
        assert torch.equal(together(layout, [part[number] for part in parts], shape.index(7)), table)


def test_item_keeps_the_rest() -> None:
    table = torch.randn(1, 6, 2)
    [first, _] = states(FlatLayout(6, 2))
    part = item(1, by_token(1))([None, table], first)
    assert part[0] is None
    assert torch.equal(part[1], table[:, :3])
    assert isinstance(part, list)
    assert isinstance(item(0, by_token(1))((table, 1), first), tuple)
    assert item(0, by_token(1))(None, first) is None


class Compressed:
    """The interface of LTX-2's compressed timestep: rows for frames or tokens, expanded on use."""

    __slots__ = ("batch_size", "data", "feature_dim", "num_frames", "patches_per_frame")

    def __init__(self, tensor: Tensor, patches_per_frame: int | None, per_frame: bool = False) -> None:
        self.batch_size, self.num_frames, self.feature_dim = tensor.shape
        self.data = tensor
        self.patches_per_frame = patches_per_frame if per_frame and patches_per_frame else 1

    def expand(self) -> Tensor:
        return self.data.repeat_interleave(self.patches_per_frame, 1)

    def expand_for_computation(self, table: Tensor, batch_size: int, indices: slice = slice(None)) -> tuple[Tensor, ...]:
        rows = self.data.view(batch_size, self.num_frames, table.size(0), -1)[:, :, indices] + table[indices]
        return tuple(value.repeat_interleave(self.patches_per_frame, 1) for value in rows.unbind(2))


STATES: dict[str, Any] = {
    "per frame": lambda: Compressed(torch.randn(2, 5, 8), 6, per_frame=True),
    "per token": lambda: Compressed(torch.randn(2, 30, 8), None),
    "one row": lambda: Compressed(torch.randn(2, 1, 8), None),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("layout", [FlatLayout(30, 4), TileLayout((5, 2, 3), (1, 3))], ids=str)
def test_compressed_timesteps(state: str, layout: SequenceLayout) -> None:
    whole, table = STATES[state](), torch.randn(4, 2)
    parts = [compressed_timestep(whole, state) for state in states(layout)]
    full = whole.expand().expand(2, 30, 8)
    assert torch.equal(together(layout, [part.expand().expand(2, n, 8) for part, n in zip(parts, layout.counts, strict=True)]), full)
    wanted = whole.expand_for_computation(table, 2, slice(1, 3))
    for number, expected in enumerate(wanted):
        values = [part.expand_for_computation(table, 2, slice(1, 3))[number] for part in parts]
        values = [value.expand(2, n, 2) for value, n in zip(values, layout.counts, strict=True)]
        assert torch.equal(together(layout, values), expected.expand(2, 30, 2))
    assert all(isinstance(part, Compressed) for part in parts)  # the model asks for its own class


def test_per_frame_rows_stay_per_frame() -> None:
    """Expanded before they are sharded they would hold every token's modulation for the whole forward."""
    whole = STATES["per frame"]()
    for state in states(FlatLayout(30, 4)):
        assert compressed_timestep(whole, state).data.size(1) == 5


def test_frames_that_are_not_the_sequence() -> None:
    [state, *_] = states(FlatLayout(31, 4))
    with pytest.raises(SPError, match="5 frames of 6 tokens do not make the 31 tokens"):
        compressed_timestep(STATES["per frame"](), state)


def test_plain_timesteps_of_an_av_model() -> None:
    [state, _] = states(FlatLayout(6, 2))
    value = torch.randn(1, 6, 4)
    assert torch.equal(compressed_timestep(value, state), value[:, :3])
    assert compressed_timestep(None, state) is None


def test_one_object_is_sharded_once_a_forward() -> None:
    state, rule, value = ForwardState(1, 2), by_token(1), torch.randn(1, 6, 2)
    state.split_by(FlatLayout(6, 2))
    assert state.apply(rule, value) is state.apply(rule, value)
    assert state.apply(rule, value.clone()) is not state.apply(rule, value)


def test_too_few_tokens_to_share() -> None:
    state = ForwardState(0, 4)
    state.split_by(FlatLayout(3, 4))
    assert state.decided
    assert not state.was_split
    assert state.describe() == "not split"
    state.check()
