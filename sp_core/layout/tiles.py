"""Two-dimensional tiles: which rectangle of every frame belongs to which rank.

A video's tokens are a raster (F, H, W): frame, row, column, the last running fastest. A
split (split_h, split_w) cuts each frame into split_h bands and split_w columns; rank r
owns tile (r div split_w, r mod split_w) of *every* frame. That is the order of
LongCat-Video's context-parallel package; there H and W must divide, here they need not.
With weights a band is as high as all its ranks together are fast, and each band has columns of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .sharding import Weights, shard_range


class Tile(NamedTuple):
    """Half-open rows and columns of one rank's rectangle, in tokens."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def area(self) -> int:
        return self.height * self.width


def factor_pairs(count: int) -> list[tuple[int, int]]:
    """All (i, count / i), i ascending.

    Raises:
        ValueError: ``count`` is below one.
    """
    if count < 1:
        raise ValueError(f"cannot split a frame over {count} ranks: at least one is needed")
    return [(i, count // i) for i in range(1, count + 1) if count % i == 0]


def get_optimal_split(count: int) -> tuple[int, int]:
    """The most square factor pair (split_h, split_w) of ``count``, split_h <= split_w.

    It does not look at the frame; :func:`choose_split` does.

    Source: LongCat-Video, context-parallel utilities (same name, same table).
    Raises:
        ValueError: ``count`` is below one.
    """
    return min((pair for pair in factor_pairs(count) if pair[0] <= pair[1]), key=lambda pair: pair[1] - pair[0])


def choose_split(height: int, width: int, count: int, weights: Weights | None = None) -> tuple[int, int]:
    """The split (split_h, split_w) of a ``height`` x ``width`` token frame over ``count`` ranks.

    Of all splits it takes the best by these criteria, the first of which that differs decides:
    no rank is without a tile; the largest tile is small (for its rank's weight), because every rank waits for the
    slowest; tiles are nearly square, so portrait frames get more bands; split_h <= split_w.

    Raises:
        ValueError: ``count``, ``height`` or ``width`` is below one.
    """
    if height < 1 or width < 1:
        raise ValueError(f"cannot tile a frame of {height} x {width} tokens")

    def cost(split: tuple[int, int]) -> tuple[bool, float, float, int]:
        split_h, split_w = split
        if weights is None:
            slowest: float = tile_of((height, width), split, 0).area  # rank 0 always owns the largest
            missing = split_h > height or split_w > width
        else:
            areas = [tile_of((height, width), split, rank, weights).area for rank in range(count)]
            slowest, missing = max(area / weight for area, weight in zip(areas, weights, strict=True)), 0 in areas
        stretch = (height * split_w) / (width * split_h)
        return missing, slowest, max(stretch, 1 / stretch), split_h

    return min(factor_pairs(count), key=cost)


def tile_of(frame: tuple[int, int], split: tuple[int, int], rank: int, weights: Weights | None = None) -> Tile:
    """Rank's rectangle of a (H, W) token frame; without weights sizes differ by at most one row and one column.

    Raises:
        ValueError: ``rank`` is outside ``split_h * split_w``, or a split is below one.
    """
    (height, width), (split_h, split_w) = frame, split
    if split_h < 1 or split_w < 1:
        raise ValueError(f"a split needs at least one band and one column, got {split_h} x {split_w}")
    if not 0 <= rank < split_h * split_w:
        raise ValueError(f"rank {rank} is outside a {split_h} x {split_w} split of {split_h * split_w} ranks")
    band, column = divmod(rank, split_w)
    if weights is None:
        return Tile(*shard_range(height, split_h, band), *shard_range(width, split_w, column))
    bands = [weights[start : start + split_w] for start in range(0, len(weights), split_w)]
    rows = shard_range(height, split_h, band, tuple(map(sum, bands)))
    return Tile(*rows, *shard_range(width, split_w, column, bands[band]))


def tile_indices(grid: tuple[int, int, int], split: tuple[int, int], rank: int, weights: Weights | None = None) -> Tensor:
    """Raster ids of the tokens that ``rank`` owns, in its local order: int64 (F * h * w,).

    Local token (f, y, x) is the global token (f, top + y, left + x).
    """
    frames, height, width = grid
    tile = tile_of((height, width), split, rank, weights)
    raster_FHW = torch.arange(frames * height * width).view(frames, height, width)
    return raster_FHW[:, tile.top : tile.bottom, tile.left : tile.right].flatten()
