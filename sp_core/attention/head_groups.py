"""Heads in groups: the exchange of one group runs while another is attended to.

A group is a contiguous range of heads, exchanged by itself. All groups but the last have as many heads for each rank, so no rank
gets more heads than by one exchange of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from ..comm.lane import Lane
from ..layout import Weights, shard_range

Shards = TypeVar("Shards")
Out = TypeVar("Out")

#: groups whose heads are on their way or have come while one is attended to
AHEAD = 2


@dataclass(frozen=True)
class Overlap:
    """How exchanges run beside attention."""

    lane: Lane
    #: at most so many groups of heads
    groups: int


def head_groups(heads: int, ranks: int, groups: int, weights: Weights | None = None) -> list[range]:
    """The heads of each group, in order: at most ``groups``, and no more than each rank has heads; one where ranks have weights."""
    if weights is not None:
        return [range(heads)]
    each = heads // ranks
    groups = max(1, min(groups, each))
    edges = [ranks * (each * group // groups) for group in range(groups)] + [heads]
    return [range(low, high) for low, high in pairwise(edges)]


def heads_of(group: range, ranks: int, rank: int, weights: Weights | None = None) -> range:
    """Which heads of a group ``rank`` attends to."""
    low, high = shard_range(len(group), ranks, rank, weights)
    return group[low:high]


def run_groups(
    groups: Sequence[range],
    scatter: Callable[[range], Shards],
    attend: Callable[[range, Shards], Out],
    gather: Callable[[range, Out], None],
    lane: Lane,
) -> None:
    """``scatter``, ``attend`` and ``gather`` for each group in order; only ``attend`` runs outside the lane.

    The order of exchanges is the same on all ranks. Nothing of it is under way when this returns or raises.
    """

    def begin(group: range) -> Callable[[], Shards]:
        return lane.start(lambda: scatter(group))

    try:
        coming = deque(begin(group) for group in groups[:AHEAD])
        gathered: deque[Callable[[], None]] = deque()
        for number, group in enumerate(groups):
            out = attend(group, coming.popleft()())
            if number + AHEAD < len(groups):
                coming.append(begin(groups[number + AHEAD]))
            gathered.append(_gather_of(lane, gather, group, out))
            del out
        while gathered:
            gathered.popleft()()
    except BaseException:
        lane.settle()  # while what it reads is still there
        raise


def _gather_of(lane: Lane, gather: Callable[[range, Out], None], group: range, out: Out) -> Callable[[], None]:
    return lane.start(lambda: gather(group, out))
