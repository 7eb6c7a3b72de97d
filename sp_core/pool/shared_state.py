"""A page of memory that all processes of a pool share, for what cannot wait for a message.

The coordinator asks for a cancel here, every rank shows how far it is, and the leader
(rank 0) says how far everybody may go. A rank enters its ``n``-th block of request ``r``
only after the leader entered its own ``n``-th, so a cancel that the leader saw stops all
ranks at the same block, without a collective that a dead rank could block. Ranks wait for
each other in every block anyway, for their exchange, so waiting for the leader costs
nothing extra. Blocks are counted as they are called: a model may call them in any order.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from enum import IntEnum

from .errors import Cancelled, PeerFailed
from .shared_buffer import SharedBuffer


class Phase(IntEnum):
    """What a rank is doing, for progress lines and time-out messages."""

    STARTING = 0
    IDLE = 1
    REPLAYING = 2
    LOADING = 3
    COMPILING = 4
    COMPUTING = 5

    @property
    def text(self) -> str:
        return ("starting", "idle", "running the graph", "loading weights", "compiling", "computing")[self]


class Header(ctypes.Structure):
    """What concerns all ranks: one cache line. Requests are numbered from 1, so 0 means none."""

    #: the coordinator writes: the request that the user cancelled
    cancelled_request: int
    #: the coordinator writes: the request that some rank failed in
    aborted_request: int
    #: the leader writes: ticket of the newest block that the ranks may enter
    leader_entered: int
    #: the leader writes: ticket of the block that no rank enters, because of a cancel
    leader_stopped: int

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("cancelled_request", "aborted_request", "leader_entered", "leader_stopped")),
        ("_unused", ctypes.c_int64 * 4),
    )


class RankState(ctypes.Structure):
    """What one rank shows of itself. Only that rank writes it; two cache lines keep it apart from its neighbours'."""

    #: grows whenever the rank gets somewhere
    ticks: int
    #: a number of :class:`Phase`
    phase_number: int
    #: the block of the forward that the rank is in, from 0, and how many there are; 0 of 0 outside a forward
    block: int
    blocks: int
    #: bytes of model weights that the rank holds on its device
    weight_bytes: int
    #: bytes of its device that the rank has taken already and could compute in
    spare_bytes: int
    #: how much of the model that the rank is loading has arrived
    loaded_percent: int
    #: how many collectives the rank has come to in this request; the ranks with the lowest number keep the others waiting
    collective_seq: int
    #: 1 once the rank is ready to join the control group
    has_arrived: int
    #: 1 where torch.compile failed on this rank in this request
    failed_to_compile: int

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("ticks", "phase_number", "block", "blocks", "weight_bytes", "spare_bytes")),
        *((name, ctypes.c_int64) for name in ("loaded_percent", "collective_seq", "has_arrived", "failed_to_compile")),
        ("_unused", ctypes.c_int64 * 6),
    )

    @property
    def phase(self) -> Phase:
        number = self.phase_number
        return Phase(number) if 0 <= number < len(Phase) else Phase.STARTING

    def begin(self) -> None:
        """The rank starts on a request."""
        self.collective_seq = self.failed_to_compile = 0
        self.ticks += 1

    def show(self, phase: Phase, block: int = 0, blocks: int = 0) -> None:
        """The rank is in this phase, and in this block of so many."""
        self.phase_number, self.block, self.blocks = phase, block, blocks
        self.ticks += 1

    def show_loaded(self, percent: int) -> None:
        """So much of the model has arrived; a rank that reads from a slow disk does not stand still."""
        if percent > self.loaded_percent:
            self.ticks += 1
        self.loaded_percent = percent

    def show_failed_to_compile(self) -> None:
        self.failed_to_compile = 1

    def enter_collective(self) -> None:
        """The rank is about to wait for others."""
        self.collective_seq += 1


class SharedState:
    """The header and one :class:`RankState` a rank, over the bytes of a shared buffer that has :meth:`nbytes` of them."""

    def __init__(self, buffer: SharedBuffer, world_size: int) -> None:
        page = buffer.buffer(self.nbytes(world_size)).numpy().data
        self.header = Header.from_buffer(page)
        offsets = (ctypes.sizeof(Header) + rank * ctypes.sizeof(RankState) for rank in range(world_size))
        self.ranks = [RankState.from_buffer(page, offset) for offset in offsets]

    def keep_a_copy(self) -> None:
        """Say from now on what the page says now, and let go of its memory: the pool is over, and somebody may still look at this."""
        self.header = Header.from_buffer_copy(self.header)
        self.ranks = [RankState.from_buffer_copy(state) for state in self.ranks]

    @staticmethod
    def nbytes(world_size: int) -> int:
        return ctypes.sizeof(Header) + world_size * ctypes.sizeof(RankState)

    def ticks(self) -> list[int]:
        """For each rank a number that grows whenever the rank gets somewhere."""
        return [state.ticks for state in self.ranks]

    def arrived(self) -> int:
        """How many workers are up and wait for the control group."""
        return sum(state.has_arrived for state in self.ranks)

    def cancel(self, request: int) -> None:
        """The coordinator asks the ranks to stop this request at their next block."""
        self.header.cancelled_request = request

    def cancelled(self, request: int) -> bool:
        return self.header.cancelled_request == request

    def abort(self, request: int) -> None:
        """The coordinator releases every rank that waits for a peer, because some rank failed in this request."""
        self.header.aborted_request = request

    def aborted(self, request: int) -> bool:
        return self.header.aborted_request == request

    def enter_block(self, rank: int, request: int, call: int, sleep: Callable[[float], None] = time.sleep) -> None:
        """Called by every rank before each block; returns when the leader has entered the same one.

        Args:
            call: how many blocks the rank has entered before in this request, so it grows by one with each.

        Raises:
            Cancelled: on every rank at the same block.
            PeerFailed: another rank failed in this request.
        """
        # Calls of blocks fit 20 bits, so one word orders those of all requests.
        ticket = (request << 20) | (call + 1)
        if rank == 0:
            if self.cancelled(request):
                self.header.leader_stopped = ticket
                raise Cancelled
            self.header.leader_entered = ticket
            return
        pause = 0.0
        while self.header.leader_entered < ticket:
            if self.header.leader_stopped == ticket:
                raise Cancelled
            if self.aborted(request):
                raise PeerFailed
            sleep(pause)
            pause = min(pause + 0.0001, 0.002)
