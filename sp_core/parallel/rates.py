"""What one device computes and one link carries in a second, measured where the ranks are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.nn.functional as F

from ..comm import Transport
from ..comm.small_collectives import all_gather_bytes, all_gather_ints
from ..planner.cost import MeasuredRates

#: rows and columns of the matrices that are multiplied
_ACCELERATOR_MATRIX, _CPU_MATRIX = 4096, 384
#: tokens of a rank, heads and head_dim of the tensors that are exchanged
_ACCELERATOR_SHAPE, _CPU_SHAPE = (4096, 32, 128), (512, 16, 64)
#: exchanges of each size, of which the first are not counted; ranks must agree on their number
_ROUNDS, _WARM_UP = 6, 2
#: what is copied to a device to measure how fast weights come from main memory
_COPIED_BYTES = 64 << 20


def measure_rates(
    transport: Transport,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float = 0.15,
    slowed: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredRates:
    """Rates of the slowest device and the slowest link, and of each device where they are of several kinds; equal on all ranks.

    Collective; takes about twice ``seconds``, and once more where devices differ.

    A device computes a square matrix product in ``dtype``; a link carries an exchange of q, k and v.

    Args:
        transport: of at least two ranks.
        slowed: how many times as long this rank is made to take for what it computes.
        clock: of what a device computes, in seconds; a benchmark with more ranks than cores takes a clock of the rank's own work.
    """
    is_cpu = device.type == "cpu"
    flops = _flops(device, dtype, _CPU_MATRIX if is_cpu else _ACCELERATOR_MATRIX, seconds, clock) / slowed
    bandwidth, latency_s = _link(transport, device, dtype)
    # all ranks copy at the same time, as the exchange before has them in step
    copied = 0.0 if is_cpu else from_main_memory(device, seconds)
    ranks = all_gather_ints(None, [int(flops / 1e6), int(bandwidth / 1e3), int(latency_s * 1e9), _memory(device), int(copied)])
    mega_flops, kilobytes, nanoseconds, memory, read = zip(*ranks, strict=True)
    rates = MeasuredRates(
        device.type,
        min(mega_flops) * 1e6,
        min(kilobytes) * 1e3,
        max(nanoseconds) / 1e9,
        transport.beside,
        memory=float(min(memory)),
        main_memory=float(min(read)),
    )
    if len(set(all_gather_bytes(None, f"{device_kind(device)} {slowed}".encode()))) == 1:
        return rates
    own = _attention_flops(device, dtype, seconds, clock) / slowed
    attention = [rate for (rate,) in all_gather_ints(None, [int(own / 1e6)])]
    return replace(
        rates,
        linear=tuple(count * 1e6 for count in mega_flops),
        attention=tuple(count * 1e6 for count in attention),
        room=tuple(map(float, memory)) if min(memory) else (),
    )


def device_kind(device: torch.device) -> str:
    """Equal for devices that are equally fast and have as much memory, as far as their driver says."""
    if device.type == "cpu":
        return "cpu"
    properties = _properties(device)
    return f"{getattr(properties, 'name', device.type)}, {_memory(device) >> 28} x 256 MiB"


def _memory(device: torch.device) -> int:
    """Bytes of memory of an accelerator; 0 where the driver does not say, and for a CPU."""
    return int(getattr(_properties(device), "total_memory", 0))


def _properties(device: torch.device) -> object:
    read = None if device.type == "cpu" else getattr(getattr(torch, device.type, None), "get_device_properties", None)
    return None if read is None else read(device)


def _attention_flops(device: torch.device, dtype: torch.dtype, seconds: float, clock: Callable[[], float]) -> float:
    """FLOP/s of this device in attention, for so many seconds."""
    heads, tokens, head_dim = (4, 512, 64) if device.type == "cpu" else (16, 8192, 128)
    q_BHTD = torch.randn(1, heads, tokens, head_dim, device=device).to(dtype)
    flop = 4.0 * heads * tokens**2 * head_dim
    return _rate(lambda: F.scaled_dot_product_attention(q_BHTD, q_BHTD, q_BHTD), flop, device, seconds, clock)


def _flops(device: torch.device, dtype: torch.dtype, size: int, seconds: float, clock: Callable[[], float]) -> float:
    """FLOP/s of this device, in products of (size, size) matrices for so many seconds."""
    matrix = torch.randn(size, size, device=device).to(dtype)
    return _rate(lambda: matrix @ matrix, 2.0 * size**3, device, seconds, clock)


def from_main_memory(device: torch.device, seconds: float) -> float:
    """Bytes/s at which this device reads from main memory, for so many seconds; from pinned memory where torch has it for the device."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):  # no accelerator, or as much is pinned as may be
        source = source.pin_memory()
    target = torch.empty_like(source, device=device)
    return _rate(lambda: target.copy_(source, non_blocking=True), float(_COPIED_BYTES), device, seconds)


def _rate(
    call: Callable[[], object], amount: float, device: torch.device, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """What a call does of something, FLOP or bytes, in a second: the median of as many calls as fit into so many seconds."""
    _seconds(call, device)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or not times:
        times.append(_seconds(call, device, clock))
    return amount / median(times)


def _link(transport: Transport, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes/s that this rank sends, and seconds of an exchange of next to nothing."""
    shards = exchanged_shards(3, device, dtype)
    full_s, latency_s = exchange_s(transport, shards), exchange_s(transport, [shard[:, :1, :, :1].contiguous() for shard in shards])
    return sent_bytes(transport, shards) / max(full_s - latency_s, 1e-6), latency_s


def exchanged_shards(count: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """One rank's part of the tensors that are exchanged to measure a link: (1, t, H, D) each, random."""
    t, H, D = _CPU_SHAPE if device.type == "cpu" else _ACCELERATOR_SHAPE
    return [torch.randn(1, t, H, D, device=device).to(dtype) for _ in range(count)]


def exchange_s(transport: Transport, shards: Sequence[torch.Tensor]) -> float:
    """Seconds of one exchange of ``shards``, (1, t, H, D) each with the same t on all ranks: the median of some. Collective."""
    counts = [shards[0].size(1)] * transport.world_size

    def exchange() -> None:
        transport.scatter_heads(shards, counts)
        transport.check()

    return median([_seconds(exchange, shards[0].device) for _ in range(_ROUNDS)][_WARM_UP:])


def sent_bytes(transport: Transport, shards: Sequence[torch.Tensor]) -> float:
    """Bytes that a rank sends in that exchange, where its heads divide: all of its shards but the part that stays."""
    return sum(shard.nbytes for shard in shards) * (transport.world_size - 1) / transport.world_size


def _seconds(call: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock() - started
