"""Ranks tell each other why they do not compile, over the parts of a batch too."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from distributed.ranks import run_ranks

from sp_core.comm import CollectiveTransport
from sp_core.host.worker.agreed import agree
from sp_core.parallel.groups import ParallelGroupsCache
from sp_core.planner.degrees import Degrees


def told(rank: int, world_size: int, cfg: int, reasons: dict[int, dict[str, str]], expected: dict[str, str]) -> None:
    cache = ParallelGroupsCache(CollectiveTransport, timedelta(seconds=60))
    groups = cache.build(Degrees(cfg, 1, world_size // cfg))
    assert groups is not None
    assert agree(reasons.get(rank, {}), rank, groups, torch.device("cpu")) == expected


@pytest.mark.parametrize(
    ("cfg", "reasons", "expected"),
    [
        (1, {}, {}),
        (1, {2: {"": "a LoRA that did not fit"}}, {"": "a LoRA that did not fit (on rank 2)"}),
        (2, {3: {"a": "é" * 900, "b": "x"}}, {"a": "é" * 200 + " (on rank 3)", "b": "x (on rank 3)"}),
        (2, {rank: {"": "a ring"} for rank in range(4)}, {"": "a ring"}),
    ],
)
def test_every_rank_knows(cfg: int, reasons: dict[int, dict[str, str]], expected: dict[str, str]) -> None:
    run_ranks(4, told, cfg, reasons, expected)
