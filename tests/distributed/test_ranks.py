"""The helper that the other tests here stand on: what goes wrong on one rank ends the test, and says where."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import run_ranks


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
