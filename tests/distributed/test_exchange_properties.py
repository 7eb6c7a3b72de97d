"""Exchange and inverse are bit-exact for any counts, heads, batch and element type."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
from campaign import parameters
from distributed.exchange_cases import ExchangeCase, check_exchange, exchange_cases
from distributed.ranks import RankPool
from hypothesis import HealthCheck, example, given, settings

from sp_core.comm import CollectiveTransport

CASES_PER_WORLD = 40  # x 9 world sizes = 360


def serve_collective(rank: int, world_size: int) -> Callable[[ExchangeCase], str | None]:
    warnings.simplefilter("error")  # a torch that deprecates what we call must not greet every user with it
    transport = CollectiveTransport()
    return lambda case: check_exchange(transport, case)


@pytest.mark.parametrize("world_size", parameters(plain=[1, 2, 3, 5, 8], campaign=[4, 6, 7, 9]))
def test_exchange_and_inverse_are_bit_exact(world_size: int) -> None:
    seen = []
    with RankPool(world_size, serve_collective) as ranks:

        @given(exchange_cases(world_size))
        @settings(max_examples=CASES_PER_WORLD, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @example(ExchangeCase((7,) * world_size, (19, 19, 18), 8, 2, 3, "float8_e4m3fn", True, 0))
        @example(ExchangeCase((0,) * world_size, (3,), 8, 1, 3, "bfloat16", False, 0))
        @example(ExchangeCase((0,) * (world_size - 1) + (5,), (1,), 8, 1, 1, "float32", False, 0))
        def generated(case: ExchangeCase) -> None:
            seen.append(case)
            assert ranks.call(case) == [None] * world_size

        generated()
    assert len(set(seen)) >= CASES_PER_WORLD
