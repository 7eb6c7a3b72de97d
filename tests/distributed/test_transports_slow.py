"""A link that is slow on purpose: the same bytes, at the time that was asked for, and the processor is free meanwhile."""

from __future__ import annotations

import math
import tempfile
import threading
import time

import pytest
import torch
from distributed.exchange_cases import ExchangeCase, check_exchange
from distributed.ranks import RankPools

from sp_core.comm.choice import make_transport
from sp_core.comm.registry import TRANSPORTS, TransportSpec, slowed
from sp_core.comm.transports.slow import SlowTransport

SHM = next(row for row in TRANSPORTS if row.name == "shm")
CASE = ExchangeCase((5, 3, 0), (7,), 4, 2, 3, "bfloat16", False, 0)


def made(bandwidth: float, latency_s: float) -> SlowTransport:
    transport = slowed(SHM, bandwidth, latency_s).make(TransportSpec(None, torch.device("cpu")))
    assert isinstance(transport, SlowTransport)
    return transport


def delivered(rank: int, world_size: int) -> tuple[str | None, float]:
    transport = made(1e9, 0.001)
    fault, link_s = check_exchange(transport, CASE), transport.link_s
    transport.close()
    return fault, link_s


def test_delivers_what_the_transport_behind_it_delivers(ranks: RankPools) -> None:
    # q, k and v there, three tensors back, and a gather: in bytes, those of the rank with the most to send
    head = 2 * 4 * 2
    sent = 3 * 5 * (7 - 3) * head, 3 * max((8 - 5) * 3, (8 - 3) * 2, 8 * 2) * head, 5 * 2 * 7 * head
    seconds = sum(sent) / 1e9 + 5 * 0.001
    assert ranks.call(3, delivered) == [(None, pytest.approx(seconds))] * 3


def timed(rank: int, world_size: int, bandwidth: float, latency_s: float) -> tuple[float, float, int, float]:
    """(wall seconds, processor seconds of the exchange, what another thread counted meanwhile, seconds on the link)."""
    transport = made(bandwidth, latency_s)
    shard = torch.zeros(1, 512, 2 * world_size, 64)
    counts = [512] * world_size
    transport.scatter_heads([shard], counts)
    transport.link_s, counted, done = 0.0, 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1

    other = threading.Thread(target=count)
    other.start()
    started, processor = time.perf_counter(), time.thread_time()
    transport.scatter_heads([shard], counts)
    took, used = time.perf_counter() - started, time.thread_time() - processor
    done.set()
    other.join()
    transport.close()
    return took, used, counted, transport.link_s


def test_an_exchange_takes_its_bytes_and_a_latency_without_the_processor(ranks: RankPools) -> None:
    sent = 512 * 2 * 64 * 4
    for took, used, counted, link_s in ranks.call(2, timed, sent / 0.2, 0.1):
        assert link_s == pytest.approx(0.3)
        assert 0.3 <= took < 2
        assert used < 0.1
        assert counted > 1000


def test_a_free_link_takes_nothing(ranks: RankPools) -> None:
    assert all(link_s == 0 for _, _, _, link_s in ranks.call(2, timed, math.inf, 0.0))


def chosen(rank: int, world_size: int) -> str:
    rows = [slowed(SHM, 1e6, 0.02), *(row for row in TRANSPORTS if row.name == "gloo")]
    with tempfile.TemporaryDirectory() as directory:
        transport, _ = make_transport(None, "cpu", directory=directory, rows=rows, trial_bytes=1 << 10)
    name = transport.name
    transport.close()
    return name


def test_the_fastest_is_found_by_time_and_not_by_name(ranks: RankPools) -> None:
    assert ranks.call(2, chosen) == ["gloo"] * 2


@pytest.mark.parametrize(("bandwidth", "latency_s"), [(0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1.0, -0.1)])
def test_a_link_that_cannot_be_is_refused(ranks: RankPools, bandwidth: float, latency_s: float) -> None:
    assert ranks.call(1, refused, bandwidth, latency_s)[0].startswith("a link needs a bandwidth above zero")


def refused(rank: int, world_size: int, bandwidth: float, latency_s: float) -> str:
    with pytest.raises(ValueError, match="link") as caught:
        SlowTransport(make_transport(None, "cpu", directory=None)[0], bandwidth, latency_s)
    return str(caught.value)
