"""Tile arithmetic: the reference's tables, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sp_core.layout import TileLayout
from sp_core.layout.tiles import choose_split, get_optimal_split, tile_indices, tile_of

VECTORS = json.loads((Path(__file__).parents[1] / "fixtures" / "longcat_vectors.json").read_text())


@pytest.mark.parametrize(("count", "split"), VECTORS["optimal_split"].items())
def test_optimal_split_is_the_references(count: str, split: list[int]) -> None:
    assert get_optimal_split(int(count)) == tuple(split)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_raster_ids_are_the_references(world_size: int) -> None:
    vector = VECTORS["split_T2_H4_W8"][str(world_size)]
    split = tuple(vector["split_hw"])
    for rank, ids in enumerate(vector["local_raster_ids"]):
        assert tile_indices((2, 4, 8), split, rank).tolist() == ids
    order = TileLayout((2, 4, 8), split).order()  # None: raster order
    assert (torch.arange(64) if order is None else order).tolist() == vector["sequence_order_after_all_to_all"]


@pytest.mark.parametrize(
    ("height", "width", "count", "split"),
    [
        (30, 52, 1, (1, 1)),
        (30, 52, 2, (1, 2)),
        (52, 30, 2, (2, 1)),  # portrait: bands
        (30, 52, 3, (3, 1)),  # 10 x 52 divides, 30 x 18 does not
        (30, 52, 4, (2, 2)),
        (30, 52, 6, (3, 2)),  # 10 x 26 divides, 15 x 18 does not
        (30, 52, 7, (1, 7)),
        (52, 30, 7, (7, 1)),
        (30, 52, 8, (2, 4)),
        (52, 30, 8, (4, 2)),
        (30, 52, 16, (4, 4)),  # 30 % 4: the reference refuses this one
        (45, 80, 4, (1, 4)),  # 45 x 20 divides, 23 x 40 does not; the reference refuses 45 % 2
        (80, 45, 4, (4, 1)),
        (34, 60, 4, (2, 2)),
        (48, 80, 16, (4, 4)),
        (32, 32, 8, (2, 4)),  # square frame: the reference's order
        (1, 1000, 4, (1, 4)),
        (3, 2, 7, (7, 1)),  # fewer tokens than ranks still gives an answer
    ],
)
def test_choose_split(height: int, width: int, count: int, split: tuple[int, int]) -> None:
    assert choose_split(height, width, count) == split


def test_chosen_split_never_leaves_a_rank_empty_when_another_would_not() -> None:
    for height in range(1, 9):
        for width in range(1, 9):
            for count in range(1, 17):
                split = choose_split(height, width, count)
                assert split[0] * split[1] == count
                possible = any(i <= height and count // i <= width for i in range(1, count + 1) if count % i == 0)
                areas = [tile_of((height, width), split, rank).area for rank in range(count)]
                assert sum(areas) == height * width
                assert (min(areas) > 0) == possible


def test_what_cannot_be_tiled_is_refused() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        get_optimal_split(0)
    with pytest.raises(ValueError, match="0 x 8 tokens"):
        choose_split(0, 8, 2)
    with pytest.raises(ValueError, match="rank 4 is outside a 2 x 2 split"):
        tile_of((4, 4), (2, 2), 4)
    with pytest.raises(ValueError, match="got 0 x 2"):
        tile_of((4, 4), (0, 2), 0)


def test_rank_order_is_a_permutation_for_uneven_tiles() -> None:
    order = TileLayout((3, 30, 52), (4, 4)).order()
    assert order is not None
    assert torch.equal(order.sort().values, torch.arange(3 * 30 * 52))
