"""The ring: every rank passes a block to the next one and gets one from the one before.

Point to point, so it is no :class:`Transport`; it counts into the same kind of stats.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import TransportStats


class Ring:
    """Neighbours in one process group, in rank order. Works with gloo, nccl, rccl and xccl."""

    def __init__(self, group: dist.ProcessGroup | None = None, stats: TransportStats | None = None) -> None:
        """``stats``: count into these, e.g. those of the transport that shares a forward."""
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.stats = TransportStats() if stats is None else stats

    def start_shift(self, send: Tensor, receive: Tensor) -> list[dist.Work]:
        """Send ``send`` to rank + 1 while ``receive`` fills from rank - 1; wait for all returned.

        Both are contiguous uint8 of at least one byte; sizes may differ from rank to rank, but
        ``receive`` has the size that the rank before sends. Both must stay untouched until
        the wait. One batch, so that nccl cannot deadlock on the order.
        """
        started = time.perf_counter()
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send, group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, receive, group=self.group, group_peer=before),
            ]
        )
        self.stats.count(send.numel(), started)
        return works

    def finish_shift(self, works: list[dist.Work]) -> None:
        started = time.perf_counter()
        for work in works:
            work.wait()
        self.stats.seconds += time.perf_counter() - started


def block_bytes(shape_k: torch.Size | tuple[int, ...], shape_v: torch.Size | tuple[int, ...], itemsize: int) -> int:
    """Size of a K/V block as it is sent: never zero, as point-to-point needs something to send."""
    return max(1, (torch.Size(shape_k).numel() + torch.Size(shape_v).numel()) * itemsize)
