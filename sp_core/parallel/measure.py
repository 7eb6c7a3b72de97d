"""What one device computes and one link carries in a second, measured where the ranks are."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from ..comm import Transport
from ..comm.small_collectives import all_gather_ints
from ..planner.cost import MeasuredRates


def measure(transport: Transport, device: torch.device, dtype: torch.dtype, seconds: float = 0.15) -> MeasuredRates:
    """Rates of the slowest device and the slowest link, equal on all ranks. Collective; takes about twice ``seconds``.

    Compute is a square matrix product in ``dtype``; the link is an exchange of q, k and v.
    """
    size = 4096 if device.type != "cpu" else 384
    a = torch.randn(size, size, device=device).to(dtype)
    flops = 2.0 * size**3 / _timed(lambda: a @ a, device, seconds)
    t, H, D = (4096, 32, 128) if device.type != "cpu" else (512, 16, 64)
    shards = [torch.randn(1, t, H, D, device=device).to(dtype) for _ in range(3)]
    counts = [t] * transport.world_size
    # a fixed number of rounds: ranks must agree on it
    times = [_once(lambda: transport.scatter_heads(shards, counts), device) for _ in range(6)]
    moved = 3 * t * H * D * shards[0].element_size() * (transport.world_size - 1) / transport.world_size
    tiny = [shard[:, :1, :, :1].contiguous() for shard in shards]
    waits = [_once(lambda: transport.scatter_heads(tiny, [1] * transport.world_size), device) for _ in range(6)]
    latency = median(waits[2:])
    bandwidth = moved / max(median(times[2:]) - latency, 1e-6)
    mine = [int(flops / 1e6), int(bandwidth / 1e3), int(latency * 1e9)]
    ranks = all_gather_ints(None, mine)
    return MeasuredRates(str(device.type), min(r[0] for r in ranks) * 1e6, min(r[1] for r in ranks) * 1e3, max(r[2] for r in ranks) / 1e9)


def _once(function: Any, device: torch.device) -> float:
    started = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def _timed(function: Any, device: torch.device, seconds: float) -> float:
    _once(function, device)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or not times:
        times.append(_once(function, device))
    return median(times)
