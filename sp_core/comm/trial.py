"""Exchanges of bytes that every rank can work out by itself: what comes back wrong is seen without another transport.

Stock drivers are known that deliver other bytes than were sent while every call succeeds, so each transport is tried before it
is used, a plain collective too: first with shapes that do not divide, then with exchanges that fill its slots to the
last byte.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import shard_range
from .small_collectives import all_gather_bytes, all_gather_ints
from .transport import Transport

log = logging.getLogger(__name__)

#: bytes that each rank receives in a trial, at least; CPU ranks share memory that the system looks after
TRIAL_BYTES, TRIAL_BYTES_CPU = 64 << 20, 1 << 20
#: bytes of a token in the exchanges that fill a buffer, and tokens of one batch entry
_ROW, _ROWS = 1024, 2048
#: bytes that are received at once where a transport has no slots of its own
_PORTION = 16 << 20
_WRONG = "wrong data"
_CASES = ((torch.float32, 5), (torch.bfloat16, 64), (torch.uint8, 3))


def trial(transport: Transport, group: dist.ProcessGroup | None, device: torch.device, received: int | None = None) -> str:
    """What fails in a transport's first exchanges, or what they deliver wrong, on which rank; or "".

    Collective; every rank gets the same answer.

    Args:
        received: bytes that each rank receives at least, by default 64 MB, and 1 MB for CPU tensors. Every slot is
            filled to its last byte, however few they are.
    """
    least = received if received is not None else TRIAL_BYTES_CPU if device.type == "cpu" else TRIAL_BYTES

    def fill() -> bool:
        slots = transport.reserve(1)
        size = slots.size or min(least, _PORTION)
        return filled_wrong(transport, device, size, max(slots.count, -(-least // size)))

    # judged one after the other: a rank that fails leaves no other one in exchanges that it does not come to
    started = time.monotonic()
    problem = _judged(lambda: _small_cases_are_wrong(transport, device), group) or _judged(fill, group)
    log.debug("tried %s in %.3f s", transport.name, time.monotonic() - started)
    return problem


def _judged(are_wrong: Callable[[], bool], group: dist.ProcessGroup | None) -> str:
    """What failed in the exchanges, or what they delivered wrong, on the first rank that says so; or ""."""
    fault = ""
    try:
        if are_wrong():
            fault = _WRONG
    except RuntimeError as error:
        fault = str(error).strip() or type(error).__name__
    for rank, text in enumerate(all_gather_bytes(group, fault.encode())):
        if text:
            first_line = text.decode(errors="replace").splitlines()[0]
            return f"{_WRONG} on rank {rank}" if first_line == _WRONG else f"the first exchange failed on rank {rank}: {first_line}"
    return ""


def wrong_data(group: dist.ProcessGroup | None, wrong: bool) -> str:
    """Which rank got wrong bytes, or "". Collective; every rank gets the same answer."""
    ranks = [rank for rank, (flag,) in enumerate(all_gather_ints(group, [wrong])) if flag]
    return f"{_WRONG} on rank {ranks[0]}" if ranks else ""


def filled_wrong(transport: Transport, device: torch.device, size: int, times: int) -> bool:
    """Whether this rank got a wrong byte in exchanges in which each receives ``size`` bytes, rounded up. Collective.

    The bytes of each exchange are others, so that one whose data never arrived is seen as well. Little memory is needed beside
    the receive buffer: a batch repeats its first entry.
    """
    rows = -(-size // _ROW)
    batch, tokens = -(-rows // _ROWS), min(rows, _ROWS)
    wrong = False
    for number in range(times):
        counts = [high - low for low, high in (shard_range(tokens, transport.world_size, rank) for rank in range(transport.world_size))]
        whole = _random((1, tokens, _ROW // 8), torch.int64, number, device)
        low, high = shard_range(tokens, transport.world_size, transport.rank)
        output = transport.all_gather_tokens(whole[:, low:high].expand(batch, -1, -1), counts)
        # in portions: a comparison on a device takes memory of its own
        wrong |= not all(torch.equal(part, whole.expand_as(part)) for part in output.split(32))
    transport.check()
    return wrong


def _small_cases_are_wrong(transport: Transport, device: torch.device) -> bool:
    """Token and head counts do not divide, and element sizes differ."""
    rank, world_size = transport.rank, transport.world_size
    outputs: list[tuple[Tensor, Tensor]] = []
    for number, (dtype, D) in enumerate(_CASES):
        H = (2 * world_size + 1, world_size, 1)[number]
        counts = [(3 + 2 * number + r) % 5 for r in range(world_size)]
        first = sum(counts[:rank])
        whole = [_random((2, sum(counts), H, D), dtype, 3 * number + index, device) for index in range(3)]
        mine = [tensor[:, first : first + counts[rank]] for tensor in whole]
        low, high = shard_range(H, world_size, rank)
        outputs += zip(transport.scatter_heads(mine, counts), (tensor[:, :, low:high] for tensor in whole), strict=True)
        # always from what is known to be right, so that a wrong byte does not travel on
        outputs.append((transport.all_gather_tokens(mine[0], counts).clone(), whole[0]))
        outputs.append((transport.gather_heads(whole[0][:, :, low:high], H, counts).clone(), mine[0]))
    transport.check()
    # judged when all was exchanged, so that ranks stay in step
    return not all(_same(have, want) for have, want in outputs)


def _random(shape: Sequence[int], dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """The same bytes on every rank."""
    generator = torch.Generator().manual_seed(seed)
    size = [*shape[:-1], shape[-1] * dtype.itemsize]
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).to(device).view(dtype)


def _same(have: Tensor, want: Tensor) -> bool:
    return have.shape == want.shape and torch.equal(have.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
