"""Ranks that are idle for some parallel degrees and take part in others: groups stay in step, and data arrives from the right ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from campaign import within
from distributed.ranks import run_ranks
from torch import Tensor

from sp_core.comm import CollectiveTransport
from sp_core.parallel.groups import ParallelGroups, ParallelGroupsCache
from sp_core.parallel.mesh import axis_members
from sp_core.planner.degrees import Degrees

#: a hang is found after this long; without one no test takes more than a few seconds where nothing else runs
FOUND_S = within(30.0)
GROUP_TIMEOUT = timedelta(minutes=7)

ALL, PAIR, ONE, CFG = Degrees(1, 1, 4), Degrees(1, 1, 2), Degrees(1, 1, 1), Degrees(2, 1, 2)
#: of 4 ranks, 0, 1, 2, 2 and 3 stay idle
FIVE = [ALL, Degrees(1, 3, 1), PAIR, Degrees(2, 1, 1), ONE]
#: all degrees after all others
TOUR = [after for first in FIVE for second in FIVE for after in (first, second)]


class Watched:
    """Notes the groups that this rank asked torch for, and those that it destroyed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.timeouts: set[timedelta | None] = set()
        self.members: list[dist.ProcessGroup] = []
        self._new_group, self._destroy = dist.new_group, dist.destroy_process_group
        patch.setattr(dist, "new_group", self.new_group)
        patch.setattr(dist, "destroy_process_group", self.destroy)

    def new_group(self, ranks: list[int], timeout: timedelta | None = None, **other: Any) -> Any:
        self.asked.append(tuple(ranks))
        self.timeouts.add(timeout)
        group = self._new_group(ranks, timeout, **other)
        if dist.get_rank() in ranks:
            self.members.append(group)
        return group

    def destroy(self, group: Any) -> None:
        self._destroy(group)
        if group in self.members:
            self.members.remove(group)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def use(groups: ParallelGroups | None, degrees: Degrees, rank: int) -> None:
    """Attention over the sequence group and a gather over the batch group give what one process gives."""
    if groups is None:
        assert rank >= degrees.ranks
        return
    members = axis_members((degrees.cfg, degrees.ring, degrees.ulysses), rank)
    row, place = min(members["sp"]), members["sp"].index(rank)
    counts = [3 + place for place in range(len(members["sp"]))]
    q, k, v = (torch.randn(1, sum(counts), 5, 8, generator=torch.Generator().manual_seed(10 * row + i)) for i in range(3))
    start = sum(counts[:place])
    mine = [x[:, start : start + counts[place]] for x in (q, k, v)]
    out = groups.sequence.attention(*mine, counts, sdpa)
    torch.testing.assert_close(out, sdpa(q, k, v)[:, start : start + counts[place]], atol=2e-6, rtol=2e-6)
    whole = groups.sequence.all_ranks.all_gather_tokens(mine[0], counts)
    assert torch.equal(whole, q)
    if groups.cfg is not None:
        gathered = groups.cfg.all_gather_tokens(torch.tensor([[float(rank)]]), [1] * degrees.cfg)
        assert gathered.flatten().tolist() == list(members["cfg"])


def visit(rank: int, world_size: int, several: list[Degrees]) -> list[tuple[int, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        cache = ParallelGroupsCache(CollectiveTransport, GROUP_TIMEOUT)
        first = {degrees: cache.build(degrees) for degrees in several}
        made = len(watched.asked)
        for degrees in several:
            groups = cache.build(degrees)
            assert groups is first[degrees]
            use(groups, degrees, rank)
        assert len(watched.asked) == made
        assert watched.timeouts == {GROUP_TIMEOUT}
        cache.close()
        assert not watched.members
        return watched.asked


@pytest.mark.parametrize(("world_size", "several"), [(4, [ALL, PAIR, CFG]), (2, [PAIR, ONE]), (4, TOUR)], ids=["three", "pair", "tour"])
def test_idle_ranks_stay_in_step(world_size: int, several: list[Degrees]) -> None:
    asked = run_ranks(world_size, visit, several, timeout=FOUND_S)
    assert all(other == asked[0] for other in asked)
    assert len(set(asked[0])) == len(asked[0])


def used_as_they_come(rank: int, world_size: int) -> None:
    # no rank waits for another before it must: idle ones are ahead
    cache = ParallelGroupsCache(CollectiveTransport, GROUP_TIMEOUT)
    for degrees in [*reversed(FIVE), CFG, *FIVE]:
        use(cache.build(degrees), degrees, rank)
    cache.close()


def test_degrees_in_use_before_the_next_is_made() -> None:
    run_ranks(4, used_as_they_come, timeout=FOUND_S)


def closed_and_rebuilt(rank: int, world_size: int) -> None:
    for several in ([PAIR, ONE], [PAIR], [ONE, PAIR]):
        cache = ParallelGroupsCache(CollectiveTransport, GROUP_TIMEOUT)
        for _ in range(2):
            for degrees in several:
                use(cache.build(degrees), degrees, rank)
            cache.close()


def test_groups_are_made_anew_after_close() -> None:
    run_ranks(2, closed_and_rebuilt, timeout=FOUND_S)


def one_misses_groups(rank: int, world_size: int) -> None:
    """A rank that is idle for some degrees fails before it hears of it; the others make their groups and finish."""
    cache = ParallelGroupsCache(CollectiveTransport, GROUP_TIMEOUT)
    for missed in ([PAIR], [ONE, PAIR]):
        use(cache.build(ALL), ALL, rank)
        if rank != 3:
            for degrees in missed:
                use(cache.build(degrees), degrees, rank)
        cache.renew()
    for degrees in FIVE:
        use(cache.build(degrees), degrees, rank)
    cache.close()


def test_a_rank_that_missed_groups_is_brought_into_step() -> None:
    run_ranks(4, one_misses_groups, timeout=FOUND_S)
