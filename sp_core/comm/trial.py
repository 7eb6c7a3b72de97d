"""The first exchanges of a transport: do they work on every rank, and do they deliver what a plain collective delivers?"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import shard_range
from .small_collectives import all_gather_bytes, all_gather_ints
from .transport import Transport

log = logging.getLogger(__name__)


def tried(transport: Transport, group: dist.ProcessGroup | None, device: torch.device) -> tuple[list[Tensor], str]:
    """What the first exchanges deliver here, and what failed on some rank, or "". Collective.

    Token and head counts do not divide, element sizes differ, and memory is reused between the cases.
    """
    fault, mine = "", []
    started = time.monotonic()
    try:
        mine = _first_exchanges(transport, device)
        transport.check()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    except RuntimeError as error:
        fault = str(error).strip() or type(error).__name__
    faults = all_gather_bytes(group, fault.encode())
    log.debug("tried %s in %.3f s", transport.name, time.monotonic() - started)
    for rank, text in enumerate(faults):
        if text:
            first_line = text.decode(errors="replace").splitlines()[0]
            return mine, f"the first exchange failed on rank {rank}: {first_line}"
    return mine, ""


def compared(transport: Transport, wanted: Sequence[Tensor] | None, group: dist.ProcessGroup | None, device: torch.device) -> str:
    """What fails on some rank in the transport's first exchanges, or differs from ``wanted`` (None: nothing is known), or "".

    Collective; every rank gets the same answer.
    """
    mine, problem = tried(transport, group, device)
    if problem or wanted is None:
        return problem
    same = all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(mine, wanted, strict=True))
    wrong = [rank for rank, (flag,) in enumerate(all_gather_ints(group, [same])) if not flag]
    return f"wrong data on rank {wrong[0]}" if wrong else ""


def _first_exchanges(transport: Transport, device: torch.device) -> list[Tensor]:
    rank, world_size = transport.rank, transport.world_size
    outputs = []
    for number, (dtype, H, D) in enumerate(((torch.float32, 2 * world_size + 1, 5), (torch.bfloat16, world_size, 64), (torch.uint8, 1, 3))):
        counts = [(3 + 2 * number + r) % 5 for r in range(world_size)]
        generator = torch.Generator().manual_seed(1000 * number + rank)
        size = (3, 2, counts[rank], H, D * dtype.itemsize)
        shards = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).to(device).view(dtype).unbind(0)
        low, high = shard_range(H, world_size, rank)
        outputs += transport.scatter_heads(shards, counts)
        whole = transport.all_gather_tokens(shards[0], counts)
        outputs += [whole, transport.gather_heads(whole[:, :, low:high], H, counts)]
    return [tensor.clone() for tensor in outputs]
