"""How long the transports that work take for one exchange, and which of them to use."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from .small_collectives import all_gather_ints, raise_together
from .transport import Transport

#: most bytes that a rank receives in an exchange that is timed. Larger ones take longer in proportion, whatever the transport;
#: CPU ranks exchange so many in milliseconds
TIMED_BYTES, TIMED_BYTES_CPU = 64 << 20, 384 << 10
#: a transport that comes later in the order of the rows is taken only if it is so much faster: clocks are not exact, and on CPU
#: ranks the time of an exchange is that of the processor, which everything else wants too
MARGIN, MARGIN_CPU = 1.1, 3.0
#: exchanges of a transport, of which the first are not counted
_ROUNDS, _WARM_UP = 4, 1
_HEAD_BYTES = 256

#: what was measured before: (ranks of the group, names of the transports, bytes) -> name and seconds of each
RememberedTimes = dict[tuple[tuple[int, ...], tuple[str, ...], int], tuple[tuple[str, float], ...]]


def pick(seconds: Mapping[str, float], margin: float = MARGIN) -> str:
    """The transport to use, of names and seconds in the order of the rows: the first that no other one beats by ``margin``."""
    best = min(seconds.values())
    return next(name for name, taken in seconds.items() if taken <= best * margin)


def figures(seconds: Mapping[str, float], size: int) -> str:
    """The times as a person reads them."""
    return f"{size / 1e6:.2g} MB take " + ", ".join(f"{1e3 * taken:.2f} ms by {name}" for name, taken in seconds.items())


def timed_bytes(device: torch.device, at_hand: int | None = None) -> int:
    """Bytes that a rank receives in an exchange that is timed: as many as are ``at_hand``, up to what measures quickly."""
    most = TIMED_BYTES_CPU if device.type == "cpu" else TIMED_BYTES
    return most if not at_hand else min(most, 1 << (at_hand - 1).bit_length())


def exchange_seconds(transport: Transport, group: dist.ProcessGroup | None, device: torch.device, size: int) -> float:
    """Median seconds of an exchange of q, k and v on the slowest rank, which receives ``size`` bytes. Collective; equal on all ranks.

    Raises:
        TransportUnavailable: on every rank alike, if an exchange fails on any.
    """
    world_size = transport.world_size
    tokens = max(1, size // (3 * _HEAD_BYTES * world_size))
    shards = [torch.zeros(1, tokens, world_size, _HEAD_BYTES, dtype=torch.uint8, device=device) for _ in range(3)]
    times, problem = [0.0], ""
    for number in range(_ROUNDS):
        all_gather_ints(group, [0])  # nobody is late
        started = time.perf_counter()
        try:
            _exchange(transport, shards, [tokens] * world_size, device)
        except RuntimeError as error:
            problem = problem or f"rank {transport.rank} could not exchange: {error}"
        if number >= _WARM_UP:
            times.append(time.perf_counter() - started)
    raise_together(group, problem)
    return max(nanoseconds for (nanoseconds,) in all_gather_ints(group, [int(1e9 * median(times[1:]))])) / 1e9


def _exchange(transport: Transport, shards: Sequence[torch.Tensor], counts: Sequence[int], device: torch.device) -> None:
    transport.scatter_heads(shards, counts)
    transport.check()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
