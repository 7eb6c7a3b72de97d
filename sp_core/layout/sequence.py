"""How one token sequence lies over the ranks: flat shards or two-dimensional tiles.

Everything here is a pure function of shapes, so every rank computes the same answer without
asking. "Raster order" is the order in which the model has its tokens. "Rank order" is the
concatenation of all ranks' shards, which is what attention sees after the exchange.

Shape legend: t one rank's tokens, T all tokens; F, H, W frames, rows and columns of the token grid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .sharding import Weights, shard_range, shard_sizes
from .tiles import Tile, choose_split, tile_indices, tile_of

#: what tiles may cost the slowest rank against a flat layout, where ranks are not equally fast
COARSE = 1.05


class SequenceLayout(ABC):
    """Who owns which tokens. Immutable and comparable: two equal layouts shard alike."""

    #: tokens of all ranks together
    tokens: int
    world_size: int
    #: tokens of each rank, the ``token_counts`` of every transport call; may hold zeros
    counts: tuple[int, ...]

    @abstractmethod
    def indices(self, rank: int) -> slice | Tensor:
        """Raster ids that ``rank`` owns, in local order: a slice, or int64 (t,) on the CPU."""

    @abstractmethod
    def shard(self, tensor: Tensor, rank: int, dim: int = 1) -> Tensor:
        """This rank's part of ``dim``: a contiguous copy that owns its storage.

        Models update residuals in place, so a view of the full tensor would not do.

        Raises:
            ValueError: ``dim`` does not have one entry a token, or no such rank.
        """

    @abstractmethod
    def restore(self, gathered: Tensor, dim: int = 1) -> Tensor:
        """The tokens of ``gathered``, in rank order along ``dim``, in raster order; the input itself when the two are the same.

        Raises:
            ValueError: ``dim`` does not have one entry a token.
        """

    @abstractmethod
    def order(self) -> Tensor | None:
        """Raster ids in rank order, int64 (T,) on the CPU; None when they are 0, 1, 2, ...

        ``raster[order]`` is rank order: apply it to both dims of a (T, T) attention mask.
        """

    @abstractmethod
    def weighted(self, weights: Weights | None) -> SequenceLayout:
        """The same sequence, with shards by these weights of the ranks; None: equal shards."""

    @abstractmethod
    def describe(self) -> str:
        """A few words for logs: "flat", "tiles 2x2"."""

    def _check(self, tensor: Tensor, dim: int) -> None:
        if tensor.size(dim) != self.tokens:
            raise ValueError(
                f"dim {dim} of a tensor of shape {tuple(tensor.shape)} has {tensor.size(dim)} entries, "
                f"but this layout ({self.describe()} over {self.world_size} ranks) has {self.tokens} tokens"
            )


@dataclass(frozen=True)
class FlatLayout(SequenceLayout):
    """Contiguous shards of a sequence of any kind, of ceil/floor size or by weights."""

    tokens: int
    world_size: int
    weights: Weights | None = None

    def __post_init__(self) -> None:
        shard_sizes(self.tokens, self.world_size, self.weights)  # refuses what cannot be sharded

    @cached_property
    def counts(self) -> tuple[int, ...]:  # type: ignore[override]
        return shard_sizes(self.tokens, self.world_size, self.weights)

    def indices(self, rank: int) -> slice:
        return slice(*shard_range(self.tokens, self.world_size, rank, self.weights))

    def shard(self, tensor: Tensor, rank: int, dim: int = 1) -> Tensor:
        self._check(tensor, dim)
        start, stop = shard_range(self.tokens, self.world_size, rank, self.weights)
        return _owned(tensor.narrow(dim, start, stop - start))

    def restore(self, gathered: Tensor, dim: int = 1) -> Tensor:
        self._check(gathered, dim)
        return gathered

    def order(self) -> None:
        return None

    def weighted(self, weights: Weights | None) -> FlatLayout:
        return replace(self, weights=weights)

    def describe(self) -> str:
        return "flat"


@dataclass(frozen=True)
class TileLayout(SequenceLayout):
    """Rectangles of a (F, H, W) token grid, all frames on every rank.

    Per-frame modulation, conditioning frames and sparse 3-D tiles stay local. ``prefix``
    and ``suffix`` tokens lie before and after the grid (reference or guide tokens) and are
    sharded flat. Local order: own prefix tokens, own tile, own suffix tokens.

    Source: LongCat-Video (even tiles only).
    """

    grid: tuple[int, int, int]
    split: tuple[int, int]
    prefix: int = 0
    suffix: int = 0
    weights: Weights | None = None

    @classmethod
    def over(cls, grid: Sequence[int], world_size: int, prefix: int = 0, suffix: int = 0) -> TileLayout:
        """The tiles of :func:`.tiles.choose_split`, one for each of ``world_size`` ranks, of a grid of frames, height and width."""
        frames, height, width = grid
        return cls((frames, height, width), choose_split(height, width, world_size), prefix, suffix)

    def __post_init__(self) -> None:
        if min(self.grid) < 1:
            raise ValueError(f"cannot tile a token grid of {' x '.join(map(str, self.grid))} (frames, height, width)")
        if min(self.split) < 1:
            raise ValueError(f"a split needs at least one band and one column, got {self.split[0]} x {self.split[1]}")
        if self.prefix < 0 or self.suffix < 0:
            raise ValueError(f"prefix and suffix token counts cannot be negative, got {self.prefix} and {self.suffix}")

    @property
    def tokens(self) -> int:  # type: ignore[override]
        return self.prefix + self.grid_tokens + self.suffix

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return self.split[0] * self.split[1]

    @property
    def grid_tokens(self) -> int:
        frames, height, width = self.grid
        return frames * height * width

    @cached_property
    def counts(self) -> tuple[int, ...]:  # type: ignore[override]
        before, after = (shard_sizes(count, self.world_size, self.weights) for count in (self.prefix, self.suffix))
        return tuple(before[rank] + self.grid[0] * self.tile(rank).area + after[rank] for rank in range(self.world_size))

    def tile(self, rank: int) -> Tile:
        """Rows and columns of every frame that ``rank`` owns."""
        return tile_of(self.grid[1:], self.split, rank, self.weights)

    def local_grid(self, rank: int) -> tuple[int, int, int]:
        """(F, h, w) of ``rank``'s tile; h * w are its tokens a frame."""
        tile = self.tile(rank)
        return self.grid[0], tile.height, tile.width

    def indices(self, rank: int) -> Tensor:
        prefix, suffix = self._extra(rank)
        after = self.prefix + self.grid_tokens
        return torch.cat(
            [
                torch.arange(*prefix),
                tile_indices(self.grid, self.split, rank, self.weights) + self.prefix,
                torch.arange(*suffix) + after,
            ]
        )

    def shard(self, tensor: Tensor, rank: int, dim: int = 1) -> Tensor:
        self._check(tensor, dim)
        dim %= tensor.dim()
        views = self._views(tensor, rank, dim)
        parts = [view.flatten(dim, dim + view.dim() - tensor.dim()) for view in views]
        return _owned(parts[0]) if len(parts) == 1 else torch.cat(parts, dim)

    def restore(self, gathered: Tensor, dim: int = 1) -> Tensor:
        self._check(gathered, dim)
        if self._order is None:
            return gathered
        dim %= gathered.dim()
        # strided writes instead of an index: no index tensor has to follow the data to its device
        raster = torch.empty_like(gathered, memory_format=torch.contiguous_format)
        start = 0
        for rank in range(self.world_size):
            for view in self._views(raster, rank, dim):
                count = view.shape[dim : dim + 1 + view.dim() - raster.dim()].numel()
                view.copy_(gathered.narrow(dim, start, count).reshape(view.shape))
                start += count
        return raster

    def order(self) -> Tensor | None:
        return self._order

    def weighted(self, weights: Weights | None) -> TileLayout:
        """Split anew: with other weights another split can be the best."""
        return replace(self, split=choose_split(*self.grid[1:], self.world_size, weights), weights=weights)

    def describe(self) -> str:
        return f"tiles {self.split[0]}x{self.split[1]}"

    @cached_property
    def _order(self) -> Tensor | None:
        order = torch.cat([self.indices(rank) for rank in range(self.world_size)])
        return None if torch.equal(order, torch.arange(self.tokens)) else order

    def _extra(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Half-open ranges of the rank's prefix tokens and of its suffix tokens."""
        before, after = (shard_range(count, self.world_size, rank, self.weights) for count in (self.prefix, self.suffix))
        return before, after

    def _views(self, tensor: Tensor, rank: int, dim: int) -> list[Tensor]:
        """The rank's parts as views of ``tensor``: (..., t, ...) or, of the grid, (..., F, h, w, ...)."""
        tile, (before, after) = self.tile(rank), self._extra(rank)
        grid = tensor.narrow(dim, self.prefix, self.grid_tokens).unflatten(dim, self.grid)
        rectangle = grid.narrow(dim + 1, tile.top, tile.height).narrow(dim + 2, tile.left, tile.width)
        views = [tensor.narrow(dim, before[0], before[1] - before[0])] if self.prefix else []
        views.append(rectangle)
        if self.suffix:
            views.append(tensor.narrow(dim, self.prefix + self.grid_tokens + after[0], after[1] - after[0]))
        return views


def too_coarse(layout: SequenceLayout, flat: SequenceLayout, weights: Weights) -> bool:
    """Whether the slowest rank has notably more to do in ``layout`` than in ``flat``: tiles are whole rows and columns."""

    def slowest(counts: tuple[int, ...]) -> float:
        return max(count / weight for count, weight in zip(counts, weights, strict=True))

    return slowest(layout.counts) > COARSE * slowest(flat.counts)


def _owned(view: Tensor) -> Tensor:
    return view.clone(memory_format=torch.contiguous_format)
