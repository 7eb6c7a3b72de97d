"""Who owns what: contiguous, possibly uneven shards of anything that can be counted, tokens or heads.

Sizes are a pure function of (count, world_size), so no rank ever has to ask another
one. Rank r owns ``ceil(count / world_size)`` items while ``r < count % world_size`` and
``floor`` items after that; a rank may own none.
"""

from __future__ import annotations

from itertools import accumulate


def shard_sizes(count: int, world_size: int) -> tuple[int, ...]:
    """Sizes of the contiguous shards of ``count`` items on ``world_size`` ranks.

    Raises:
        ValueError: ``count`` is negative or ``world_size`` is below one.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if count < 0:
        raise ValueError(f"cannot shard a negative count ({count})")
    base, extra = divmod(count, world_size)
    return tuple(base + (rank < extra) for rank in range(world_size))


def shard_offsets(sizes: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """Exclusive prefix sum: where each shard starts."""
    return tuple(accumulate((0, *sizes[:-1]))) if sizes else ()


def shard_range(count: int, world_size: int, rank: int) -> tuple[int, int]:
    """Half-open range ``[start, stop)`` of the items that ``rank`` owns."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    sizes = shard_sizes(count, world_size)
    start = sum(sizes[:rank])
    return start, start + sizes[rank]
