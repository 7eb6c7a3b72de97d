"""Exchange and inverse are bit-exact for any counts, heads, batch and element type, on every transport of CPU tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from campaign import parameters
from distributed.exchange_cases import ExchangeCase, check_exchange, exchange_cases
from distributed.ranks import RankPool
from hypothesis import HealthCheck, example, given, settings

from sp_core.comm.registry import TRANSPORTS, TransportSpec

#: name of a row -> world sizes that it is driven at
PLAIN = {
    "gloo": (1, 2, 3, 5),
    "shm": (1, 2, 3, 4, 5, 9),
    "staged-gloo": (3,),
    "staged-shm": (3,),
}
CAMPAIGN_ADDS = {"gloo": (4, 6, 7, 8, 9), "shm": (8,)}
CASES_PER_WORLD = 40
#: moved by tests/gpu
NEED_A_GPU = {"peer", "nccl"}


def sizes(table: dict[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    return [(name, size) for name, world_sizes in table.items() for size in world_sizes]


def serve(name: str, rank: int, world_size: int) -> Callable[[ExchangeCase], str | None]:
    warnings.simplefilter("error")  # a torch that deprecates what we call must not greet every user with it
    row = next(row for row in TRANSPORTS if row.name == name)
    transport = row.make(TransportSpec(None, torch.device("cpu")))
    return lambda case: check_exchange(transport, case)


@pytest.mark.parametrize(("name", "world_size"), parameters(plain=sizes(PLAIN), campaign=sizes(CAMPAIGN_ADDS)))
def test_exchange_and_inverse_are_bit_exact(name: str, world_size: int) -> None:
    seen = []
    with RankPool(world_size, partial(serve, name)) as ranks:

        @given(exchange_cases(world_size))
        @settings(max_examples=CASES_PER_WORLD, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @example(ExchangeCase((7,) * world_size, (19, 19, 18), 8, 2, 3, "float8_e4m3fn", True, 0))
        @example(ExchangeCase((0,) * world_size, (3,), 8, 1, 3, "bfloat16", False, 0))
        @example(ExchangeCase((0,) * (world_size - 1) + (5,), (1,), 8, 1, 1, "float32", False, 0))
        def generated(case: ExchangeCase) -> None:
            seen.append(case)
            assert ranks.call(case, timeout=240) == [None] * world_size  # the first call waits for the start

        generated()
    assert len(set(seen)) >= CASES_PER_WORLD


def test_every_transport_is_driven() -> None:
    assert set(PLAIN) == {row.name for row in TRANSPORTS} - NEED_A_GPU
