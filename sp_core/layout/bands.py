"""Which rank owns which rows of a frame: bands, one below the other, each over the frame's whole width.

Bands are cut where the frame is smallest, in rows of the latent. A model that makes the frame larger or smaller scales
every band by the same whole number, so no rank ever has to ask another one where its rows begin.
"""

from __future__ import annotations

from dataclasses import dataclass

from .sharding import shard_offsets, shard_sizes


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of the frame, and the other rank that they come from or go to."""

    rank: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Bands:
    """One band for each rank that has rows, from the top of the frame to its bottom."""

    counts: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many ranks have rows. Others stay idle."""
        return len(self.counts)

    @property
    def height(self) -> int:
        return sum(self.counts)

    def range(self, rank: int) -> tuple[int, int]:
        """Half-open range of the rows that ``rank`` owns."""
        start = shard_offsets(self.counts)[rank]
        return start, start + self.counts[rank]

    def scaled(self, factor: int) -> Bands:
        """The same bands where the frame has ``factor`` times as many rows."""
        return Bands(tuple(count * factor for count in self.counts))

    def needed(self, rank: int, above: int, below: int) -> tuple[Rows, ...]:
        """The rows of others within ``above`` rows over and ``below`` rows under the band of ``rank``, from top to bottom.

        The frame ends where it ends: at its borders there are fewer. A band of few rows is stepped over.
        """
        start, stop = self.range(rank)
        wanted = ((max(0, start - above), start), (stop, min(self.height, stop + below)))
        found = []
        for owner in range(self.ranks):
            first, last = self.range(owner)
            for low, high in wanted:
                piece = Rows(owner, max(first, low), min(last, high))
                if owner != rank and piece.count > 0:
                    found.append(piece)
        return tuple(found)

    def given(self, rank: int, above: int, below: int) -> tuple[Rows, ...]:
        """The rows of ``rank`` that others need, each with the rank that needs them."""
        others = (other for other in range(self.ranks) if other != rank)
        return tuple(
            Rows(other, piece.start, piece.stop) for other in others for piece in self.needed(other, above, below) if piece.rank == rank
        )


def cut_bands(height: int, world_size: int) -> Bands:
    """Cut ``height`` rows of the latent for at most ``world_size`` ranks; a frame with fewer rows than ranks leaves some idle.

    Raises:
        ValueError: there are no rows, or no ranks.
    """
    if height < 1:
        raise ValueError(f"a frame of {height} rows cannot be cut")
    return Bands(tuple(count for count in shard_sizes(height, world_size) if count))
