"""Shards and their inverse, for both layouts, over every awkward size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_core.layout import FlatLayout, SequenceLayout, TileLayout, choose_split

small = st.integers(1, 7)
flat_layouts = st.builds(FlatLayout, st.integers(0, 50), st.integers(1, 9))
tile_layouts = st.builds(
    TileLayout, st.tuples(small, small, small), st.tuples(st.integers(1, 4), st.integers(1, 4)), st.integers(0, 9), st.integers(0, 9)
)


@given(st.one_of(flat_layouts, tile_layouts), st.integers(-2, 2))
@settings(max_examples=300, deadline=None)
def test_shards_are_the_indexed_tokens_and_restore_inverts(layout: SequenceLayout, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = layout.tokens
    raster = torch.arange(2 * 3 * 4 * layout.tokens)[: torch.Size(shape).numel()].view(shape)
    # the input is not contiguous: models hand over slices and transposes
    raster = raster.transpose(0, 2).contiguous().transpose(0, 2)
    shards = [layout.shard(raster, rank, dim) for rank in range(layout.world_size)]
    for rank, shard in enumerate(shards):
        ids = torch.arange(layout.tokens)[layout.indices(rank)]
        assert torch.equal(shard, raster.index_select(dim, ids))
        assert shard.is_contiguous()
        assert shard.size(dim) == layout.counts[rank]
        assert shard.numel() == 0 or shard.untyped_storage().data_ptr() != raster.untyped_storage().data_ptr()
    assert sum(layout.counts) == layout.tokens
    gathered = torch.cat(shards, dim)
    assert torch.equal(layout.restore(gathered, dim), raster)
    order = layout.order()
    if order is None:
        assert torch.equal(gathered, raster)
    else:
        assert torch.equal(gathered.index_select(dim, order.argsort()), raster)
        assert torch.equal(raster.index_select(dim, order), gathered)


@pytest.mark.parametrize(("grid", "count"), [((24, 30, 52), 16), ((24, 45, 80), 4), ((24, 30, 52), 8), ((4, 90, 50), 7), ((1, 45, 80), 6)])
def test_real_frames_on_any_count(grid: tuple[int, int, int], count: int) -> None:
    layout = TileLayout.over(grid, count)
    assert layout == TileLayout(grid, choose_split(grid[1], grid[2], count))
    raster = torch.arange(layout.tokens)
    gathered = torch.cat([layout.shard(raster, rank, 0) for rank in range(count)])
    assert torch.equal(layout.restore(gathered, 0), raster)
    for rank in range(count):
        frames, height, width = layout.local_grid(rank)
        assert frames == grid[0]
        # every frame has the same number of tokens on this rank, in frame order
        expected = torch.arange(frames).repeat_interleave(height * width)
        assert torch.equal(layout.indices(rank) // (grid[1] * grid[2]), expected)


def test_prefix_and_suffix_are_outside_the_frames() -> None:
    layout = TileLayout((2, 2, 2), (1, 2), prefix=1, suffix=3)
    assert layout.counts == (1 + 4 + 2, 4 + 1)
    assert layout.indices(0).tolist() == [0, 1, 3, 5, 7, 9, 10]
    assert layout.indices(1).tolist() == [2, 4, 6, 8, 11]


def test_layouts_compare_by_value_and_describe_themselves() -> None:
    assert FlatLayout(8, 2) == FlatLayout(8, 2) != FlatLayout(9, 2)
    assert len({TileLayout((1, 2, 3), (1, 3)), TileLayout((1, 2, 3), (1, 3))}) == 1
    assert FlatLayout(8, 2).describe() == "flat"
    assert TileLayout((1, 4, 4), (2, 2)).describe() == "tiles 2x2"


def test_bands_of_one_frame_are_raster_already() -> None:
    assert TileLayout((1, 6, 4), (3, 1)).order() is None
    assert TileLayout((5, 6, 4), (1, 1), prefix=2).order() is None
    assert TileLayout((2, 6, 4), (3, 1)).order() is not None


def test_refusals_name_axis_size_and_degree() -> None:
    with pytest.raises(ValueError, match=r"dim 1 .* has 9 entries, .*flat over 2 ranks.* has 8 tokens"):
        FlatLayout(8, 2).shard(torch.zeros(1, 9, 4), 0, 1)
    with pytest.raises(ValueError, match=r"dim 0 .* has 9 entries, .*tiles 1x2 over 2 ranks.* has 8 tokens"):
        TileLayout((2, 2, 2), (1, 2)).restore(torch.zeros(9), 0)
    with pytest.raises(ValueError, match="rank 2 is outside"):
        TileLayout((2, 2, 2), (1, 2)).shard(torch.zeros(8), 2, 0)
    with pytest.raises(ValueError, match="0 x 2 x 2"):
        TileLayout((0, 2, 2), (1, 2))
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        FlatLayout(8, 0)
