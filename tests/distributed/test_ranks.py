"""The helper that the other tests here stand on: what goes wrong on one rank ends the test, and says where."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import RankPools, run_ranks


def total(rank: int, world_size: int) -> torch.Tensor:
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value


def dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def raises(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("wrong sign")
    time.sleep(60)


def test_results_in_rank_order() -> None:
    assert [value.item() for value in run_ranks(3, total)] == [3.0, 3.0, 3.0]


def test_a_rank_that_dies() -> None:
    with pytest.raises(AssertionError, match="rank 1 died with exit code 7"):
        run_ranks(2, dies)


def test_a_rank_that_raises() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 failed:\n(.|\n)*wrong sign"):
        run_ranks(2, raises)


def test_a_rank_that_says_nothing() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] did not answer in 2 s"):
        run_ranks(2, time_passes, timeout=2)


def time_passes(rank: int, world_size: int) -> None:
    time.sleep(60)


def process_of(rank: int, world_size: int) -> int:
    return os.getpid()


def fails_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("wrong sign")
    dist.barrier()  # where rank 1 never comes


def test_ranks_stay_from_call_to_call(ranks: RankPools) -> None:
    first = ranks.call(2, process_of)
    assert ranks.call(2, process_of) == first
    assert len({*first, *ranks.call(3, process_of)}) == 5


@pytest.mark.parametrize(
    ("failing", "message"), [(fails_on_rank_1, "rank 1 failed:\n(.|\n)*wrong sign"), (dies, "rank 1 died with exit code 7")]
)
def test_the_call_after_a_failure_has_new_ranks(ranks: RankPools, failing: Callable, message: str) -> None:
    before = ranks.call(2, process_of)
    with pytest.raises(AssertionError, match=message):
        ranks.call(2, failing)
    assert not {*ranks.call(2, process_of)} & {*before}
    assert [value.item() for value in ranks.call(2, total)] == [1.0, 1.0]
