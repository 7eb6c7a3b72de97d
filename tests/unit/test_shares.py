"""Shares of ranks that are not equally fast: sizes by weight, tiles by weight, heads of a ring's columns."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_core.layout import FlatLayout, Shares, TileLayout, choose_split, shard_range, shard_sizes, uneven

weights = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


@pytest.mark.parametrize(
    ("count", "weights", "sizes"),
    [
        (12, (3, 1), (9, 3)),
        (24, (3, 1), (18, 6)),
        (40, (3, 1), (30, 10)),
        (12, (2, 1, 1), (6, 3, 3)),
        (40, (2, 1, 1), (20, 10, 10)),
        (12, (5, 3), (8, 4)),  # 8 / 5 and 4 / 3; 7 and 5 would end at 5 / 3
        (24, (5, 3), (15, 9)),
        (40, (5, 3), (25, 15)),
        (1, (1, 3), (0, 1)),
        (2, (9, 1), (2, 0)),
        (0, (3, 1), (0, 0)),
        (5, (100, 1, 100), (3, 0, 2)),
    ],
)
def test_sizes_by_weight(count: int, weights: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    assert shard_sizes(count, len(weights), weights) == sizes


@given(st.integers(0, 200), st.integers(1, 16), st.integers(1, 9))
def test_equal_weights_give_the_sizes_that_none_give(count: int, world_size: int, weight: int) -> None:
    assert shard_sizes(count, world_size, (weight,) * world_size) == shard_sizes(count, world_size)


@given(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
@settings(deadline=None)
def test_no_other_sizes_end_earlier(count: int, weights: tuple[int, ...]) -> None:
    def end(sizes: tuple[int, ...]) -> Fraction:
        return max(Fraction(size, weight) for size, weight in zip(sizes, weights, strict=True))

    others = [sizes for sizes in product(range(count + 1), repeat=len(weights)) if sum(sizes) == count]
    sizes = shard_sizes(count, len(weights), weights)
    assert sizes in others
    assert end(sizes) == min(map(end, others))


@pytest.mark.parametrize("weights", [(1,), (1, 2, 3), (0, 1), (-1, 3)])
def test_weights_that_do_not_fit_the_ranks_are_refused(weights: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="2 ranks need as many positive weights"):
        shard_sizes(7, 2, weights)


@given(weights, st.tuples(*[st.integers(1, 9)] * 3), st.data())
@settings(max_examples=200, deadline=None)
def test_weighted_shards_hold_each_token_once(weights: tuple[int, ...], grid: tuple, data: st.DataObject) -> None:
    world_size = len(weights)
    if data.draw(st.booleans()):
        layout = FlatLayout(data.draw(st.integers(0, 60)), world_size).weighted(weights)
        assert layout.counts == shard_sizes(layout.tokens, world_size, weights)
    else:
        layout = TileLayout.over(grid, world_size, data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))).weighted(weights)
    raster = torch.arange(layout.tokens)
    shards = [layout.shard(raster, rank, 0) for rank in range(world_size)]
    assert tuple(map(len, shards)) == layout.counts
    assert all(torch.equal(shard, raster[layout.indices(rank)]) for rank, shard in enumerate(shards))
    assert torch.equal(layout.restore(torch.cat(shards), 0), raster)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_equal_weights_give_the_tiles_that_none_give(world_size: int) -> None:
    plain = TileLayout.over((3, 30, 52), world_size, 4, 5)
    weighted = plain.weighted((7,) * world_size)
    assert (weighted.split, weighted.counts) == (plain.split, plain.counts)
    assert [weighted.tile(rank) for rank in range(world_size)] == [plain.tile(rank) for rank in range(world_size)]
    assert weighted.weighted(None) == plain


@pytest.mark.parametrize(
    ("weights", "split", "areas"),
    [
        ((3, 1), (1, 2), (30 * 39, 30 * 13)),
        ((2, 1, 1), (1, 3), (30 * 26, 30 * 13, 30 * 13)),
        ((1, 3), (1, 2), (30 * 13, 30 * 39)),
        ((3, 1, 1, 1), (2, 2), (20 * 39, 20 * 13, 10 * 26, 10 * 26)),  # each band has columns of its own
    ],
)
def test_tiles_are_as_large_as_their_ranks_are_fast(weights: tuple[int, ...], split: tuple[int, int], areas: tuple[int, ...]) -> None:
    layout = TileLayout((1, 30, 52), split).weighted(weights)
    assert layout.split == choose_split(30, 52, len(weights), weights) == split
    assert layout.counts == areas


@pytest.mark.parametrize(
    ("shares", "ring", "columns"),
    [
        (Shares.of((3, 1)), 1, (3, 1)),
        (Shares((1, 1), (6, 3)), 1, (2, 1)),
        (Shares.of((3, 1, 3, 1)), 2, (3, 1)),
        # ranks 0 and 2 attend for twice as many queries as 1 and 3 would, at twice the speed
        (Shares.of((2, 2, 1, 1)), 2, (1, 1)),
        (Shares.of((3, 1, 1, 1)), 2, (2, 1)),  # 3 / 4 and 1 / 2, 1 / 4 and 1 / 2: the slowest of each column
    ],
)
def test_heads_of_a_rings_columns(shares: Shares, ring: int, columns: tuple[int, ...]) -> None:
    assert shares.of_columns(ring) == columns


def test_equal_shares_are_none() -> None:
    assert uneven(Shares.of((2, 2, 2))) is None
    assert uneven(None) is None
    assert uneven(Shares((1, 1), (2, 1))) == Shares((1, 1), (2, 1))
    assert Shares.of((3, 1, 2, 2)).part(2, 4) is None
    assert Shares.of((3, 1, 2, 2)).part(0, 2) == Shares.of((3, 1))


@pytest.mark.parametrize("numbers", [((), ()), ((1, 2), (1,)), ((0, 1), (1, 1))])
def test_shares_without_a_positive_number_for_each_rank_are_refused(numbers: tuple) -> None:
    with pytest.raises(ValueError, match="one positive number a rank"):
        Shares(*numbers)


def test_shares_are_told() -> None:
    assert Shares.of((3, 1)).describe() == "shares 3:1"
    assert Shares((3, 1), (2, 1)).describe() == "shares 3:1 of tokens, 2:1 of heads"


def test_a_range_follows_the_weights() -> None:
    assert [shard_range(12, 2, rank, (3, 1)) for rank in range(2)] == [(0, 9), (9, 12)]
