"""Segments and replicated tokens, sharded for each rank of flat and tiled layouts."""

from __future__ import annotations

import pytest
import torch

from sp_core.errors import SPError
from sp_core.layout import FlatLayout, SequenceLayout, TileLayout
from sp_core.plans.architectures.minimax import segment
from sp_core.plans.forward_state import ForwardState
from sp_core.plans.shard_rules import first_tokens, joint_by_token, joint_segments, segments

LAYOUTS = [FlatLayout(30, 4), TileLayout((2, 5, 3), (1, 3)), TileLayout((2, 4, 3), (2, 1), prefix=3, suffix=3)]
SEGMENTS = [(0, 4, 7), (4, 5, 2), (5, 21, 7), (21, None, 0)]


def state_of(layout: SequenceLayout, rank: int, replicated: int = 0) -> ForwardState:
    state = ForwardState(rank, layout.world_size)
    state.split_by(layout)
    state.replicated_tokens = replicated
    return state


def rows(value: list, tokens: int) -> list[int]:
    """Row of each token, one by one; segments must be in order and without holes."""
    found: list[int] = []
    for start, stop, row in value:
        assert start == len(found)
        found += [row] * ((tokens if stop is None else stop) - start)
    assert len(found) == tokens
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_each_token_keeps_its_row(layout: SequenceLayout) -> None:
    whole = rows(SEGMENTS, layout.tokens)
    for rank in range(layout.world_size):
        own = torch.arange(layout.tokens)[layout.indices(rank)].tolist()
        assert rows(segments(SEGMENTS, state_of(layout, rank)), len(own)) == [whole[i] for i in own]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_segments_that_count_the_text(layout: SequenceLayout) -> None:
    """HunyuanVideo's single blocks: the first frame's tokens are counted from the first text token on."""
    text, value = 3, [(0, 10, 0), (10, None, 1)]
    whole = rows(value, text + layout.tokens)
    for rank in range(layout.world_size):
        own = torch.arange(layout.tokens)[layout.indices(rank)].tolist()
        expected = whole[:text] + [whole[text + i] for i in own]
        assert rows(joint_segments(value, state_of(layout, rank, text)), text + len(own)) == expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_replicated_tokens_stay_in_front(layout: SequenceLayout) -> None:
    table = torch.arange(2 * (4 + layout.tokens)).view(1, 1, -1, 2)
    for rank in range(layout.world_size):
        part = joint_by_token(2)(table, state_of(layout, rank, 4))
        assert torch.equal(part[:, :, :4], table[:, :, :4])
        assert torch.equal(part[:, :, 4:], layout.shard(table[:, :, 4:], rank, 2))


def test_parts_of_one_segment_make_it_whole() -> None:
    layout = FlatLayout(23, 4)
    for start, stop in ((0, 23), (5, 7), (6, 6), (17, 23), (11, None)):
        found: list[int] = []
        for rank in range(4):
            lower, upper, row = segment((start, stop, 9), state_of(layout, rank))
            assert row == 9 and 0 <= lower <= upper <= layout.counts[rank]
            found += list(range(23))[layout.indices(rank)][lower:upper]
        assert found == list(range(23))[start:stop]


def test_one_segment_needs_a_flat_layout() -> None:
    with pytest.raises(SPError, match="can only be shared flat"):
        segment((0, 4, 0), state_of(LAYOUTS[1], 0))


@pytest.mark.parametrize("rank", range(4))
def test_replicated_tokens_may_stand_behind(rank: int) -> None:
    layout = LAYOUTS[0]
    state = state_of(layout, rank, 4)
    state.replicated_behind = True
    table = torch.arange(34).reshape(1, 1, 34, 1)
    part = joint_by_token(2)(table, state)
    own = torch.arange(30)[layout.indices(rank)]
    assert part.flatten().tolist() == [*own.tolist(), 30, 31, 32, 33]
    text, stream = state.parted(part, 2, 4)
    assert text.flatten().tolist() == [30, 31, 32, 33] and torch.equal(state.together(text, stream, 2), part)


def test_first_tokens() -> None:
    counts = [first_tokens(19, state_of(LAYOUTS[0], rank)) for rank in range(4)]
    assert counts == [8, 8, 3, 0] and sum(counts) == 19
    with pytest.raises(SPError, match="leave the layout of SP Model Patch at auto or flat"):
        first_tokens(19, state_of(LAYOUTS[1], 0))
