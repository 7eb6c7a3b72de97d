"""Tensors that go straight from one rank to another: the rows that neighbours need of each other.

Not every rank takes part with every other, so it is no :class:`Transport`; it counts into the same kind of stats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import TransportStats


class PointToPoint:
    """Messages between the ranks of one process group. Works with gloo, nccl, rccl and xccl."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, stats: TransportStats | None = None, on_enter: Callable[[], None] | None = None
    ) -> None:
        """
        Args:
            stats: count into these, e.g. those of the transport that shares a request.
            on_enter: called whenever this rank is about to wait for the others.
        """
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.stats = TransportStats() if stats is None else stats
        self._on_enter = on_enter

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        """Send each tensor to its rank of the group while the others fill from theirs; what is returned waits until all have arrived.

        At most one tensor goes from a rank to another. What is received into is contiguous. One batch, so that nccl cannot
        deadlock on the order.
        """
        if not sends and not receives:
            return lambda: None
        if self._on_enter is not None:
            self._on_enter()
        started = time.perf_counter()
        outgoing = [(peer, _as_bytes(tensor.contiguous())) for peer, tensor in sends]
        operations = [dist.P2POp(dist.isend, data, group=self.group, group_peer=peer) for peer, data in outgoing]
        operations += [dist.P2POp(dist.irecv, _as_bytes(tensor), group=self.group, group_peer=peer) for peer, tensor in receives]
        works = dist.batch_isend_irecv(operations)
        self.stats.count(sum(data.numel() for _, data in outgoing), started)

        def wait() -> None:
            began = time.perf_counter()
            for work in works:
                work.wait()
            self.stats.seconds += time.perf_counter() - began
            outgoing.clear()  # until here the tensors that are sent have to live

        return wait


def _as_bytes(tensor: Tensor) -> Tensor:
    # collectives differ in the dtypes they accept; data movement does not care
    return tensor.view(-1).view(torch.uint8)
