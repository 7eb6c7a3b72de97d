"""Who owns what: contiguous, possibly uneven shards of anything that can be counted, tokens or heads.

Sizes are a pure function of (count, world_size, weights), so no rank ever has to ask another
one. Without weights rank r owns ``ceil(count / world_size)`` items while ``r < count % world_size`` and
``floor`` items after that. Weights say what the ranks do in a second, and the slowest one finishes as
early as whole items let it. A rank may own none.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

#: one positive whole number a rank: how much it does, compared with the others
Weights = tuple[int, ...]


def shard_sizes(count: int, world_size: int, weights: Weights | None = None) -> tuple[int, ...]:
    """Sizes of the contiguous shards of ``count`` items on ``world_size`` ranks.

    With weights the largest size / weight is as small as it can be. Equal weights give what none give.

    Raises:
        ValueError: ``count`` is negative, ``world_size`` is below one, or the weights are not one positive number a rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if count < 0:
        raise ValueError(f"cannot shard a negative count ({count})")
    if weights is None:
        base, extra = divmod(count, world_size)
        return tuple(base + (rank < extra) for rank in range(world_size))
    if len(weights) != world_size or min(weights) < 1:
        raise ValueError(f"{world_size} ranks need as many positive weights, got {list(weights)}")
    total = sum(weights)
    sizes = [count * weight // total for weight in weights]
    for _ in range(count - sum(sizes)):  # each of the rest goes where it is done first
        rank = min(range(world_size), key=lambda r: Fraction(sizes[r] + 1, weights[r]))
        sizes[rank] += 1
    return tuple(sizes)


def shard_offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Exclusive prefix sum: where each shard starts."""
    return tuple(accumulate((0, *sizes[:-1]))) if sizes else ()


def shard_range(count: int, world_size: int, rank: int, weights: Weights | None = None) -> tuple[int, int]:
    """Half-open range ``[start, stop)`` of the items that ``rank`` owns."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    sizes = shard_sizes(count, world_size, weights)
    start = sum(sizes[:rank])
    return start, start + sizes[rank]
