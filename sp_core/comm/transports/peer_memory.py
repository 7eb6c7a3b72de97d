"""The receive buffers of GPU ranks: one allocation a rank, opened by all others, cut into slots that are lent to tensors."""

from __future__ import annotations

import weakref
from collections import deque

import torch.distributed as dist

from ..errors import TransportUnavailable
from ..native.cuda import IPC_HANDLE_BYTES, CudaError
from ..native.gpu import GpuCalls
from ..small_collectives import all_gather_bytes, raise_together
from .exchange_transport import other_exchange

#: slots that are larger are few, and as large as needed
LARGE_SLOT_BYTES = 256 << 20


def slot_count(slot_bytes: int) -> int:
    """Slots a rank: one being written, one granted ahead, and two for tensors in use (q, k, v and an output).

    One less where they are large: with q, k and v still in use, an output is then copied out.
    """
    return 4 if slot_bytes <= LARGE_SLOT_BYTES else 3


def rounded_slot(need: int) -> int:
    """Bytes of a slot for an exchange of ``need`` bytes: a quarter more where that is little, in whole 2 MB pages."""
    page = 2 << 20
    spare = need // 4 if need <= LARGE_SLOT_BYTES // 2 else 0
    return -(-(need + spare) // page) * page


class Allocation:
    """One device buffer; freed when neither the transport nor a tensor holds it."""

    def __init__(self, library: GpuCalls, size: int) -> None:
        self.base, self.handle = library.allocate(size)
        weakref.finalize(self, _free, library, self.base).atexit = False


def _free(library: GpuCalls, base: int) -> None:
    library.free(base)


class Lease:
    """The use of one slot, by all tensors over it."""

    def __init__(self, allocation: Allocation, address: int) -> None:
        self.allocation, self.address = allocation, address


class Window:
    """A part of a leased slot as torch can wrap it; torch keeps this object, and so the lease, with the tensor."""

    def __init__(self, lease: Lease, offset: int, size: int) -> None:
        self.lease = lease
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (lease.address + offset, False), "version": 3}


class PeerMemory:
    """Own slots and the peers' view of everybody's. Made and grown by all ranks together.

    Raises:
        TransportUnavailable: on every rank alike, if memory or a peer's handle cannot be had.
    """

    def __init__(self, group: dist.ProcessGroup | None, library: GpuCalls, slot_bytes: int) -> None:
        rank = dist.get_rank(group)
        self.slot_bytes = slot_bytes
        self._library = library
        self._opened: list[int] = []
        self._ended: deque[int] = deque()  # appended to by finalizers: only atomic operations
        count = slot_count(slot_bytes)
        self.free = list(range(1, count))  # slot 0 is everybody's first, by agreement
        self.peers: list[int] = []
        problem, handle = "", b"\0" * IPC_HANDLE_BYTES
        try:
            self.allocation: Allocation | None = Allocation(library, library.slots_offset + count * slot_bytes)
            handle = self.allocation.handle
        except CudaError as error:
            problem = f"rank {rank} has no {count * slot_bytes / 1e6:.0f} MB for exchange buffers ({error})"
        handles = all_gather_bytes(group, handle)
        raise_together(group, problem)
        assert self.allocation is not None
        for peer, other in enumerate(handles):
            if peer == rank:
                self.peers.append(self.allocation.base)
                continue
            try:
                self.peers.append(library.open(other))
                self._opened.append(self.peers[-1])
            except CudaError as error:
                problem = f"rank {rank} cannot open the memory of rank {peer} ({error})"
                break
        try:
            raise_together(group, problem)
        except TransportUnavailable:
            self.close()
            raise

    def reclaim(self) -> None:
        """Takes back the slots whose tensors are gone."""
        while self._ended:
            self.free.append(self._ended.popleft())

    def window(self, slot: int) -> Lease:
        """A slot to read from now, before anything else is enqueued."""
        assert self.allocation is not None
        return Lease(self.allocation, self.allocation.base + self._library.slots_offset + slot * self.slot_bytes)

    def lend(self, slot: int) -> Lease:
        """A slot that comes back when the last tensor over it is gone."""
        lease = self.window(slot)
        weakref.finalize(lease, self._ended.append, slot).atexit = False
        return lease

    def close_peers(self) -> None:
        """Closes the peers' memory. Nothing may be under way."""
        for base in self._opened:
            self._library.close(base)
        self._opened.clear()

    def close(self) -> None:
        """Lets go of everything; the own memory stays until its last tensor is gone."""
        self.close_peers()
        self.allocation = None


def agree_on_exchange(group: dist.ProcessGroup | None, epoch: int, signature: bytes) -> None:
    """Raises an ExchangeError on every rank if they do not all mean the same exchange. Collective."""
    everybody = all_gather_bytes(group, signature)
    for other, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise other_exchange(epoch, 0, everybody[0], other, theirs)
