"""The pool's notice shared_state: a page of shared memory for what cannot wait for a message.

The coordinator asks for a cancel here, every rank shows how far it is, and the leader
(rank 0) says how far everybody may go. A rank enters block ``n`` of forward ``f`` only
after the leader entered it, so a cancel that the leader saw stops all ranks at the same
block, without a collective that a dead rank could block. Since an exchange inside every
block makes ranks wait for each other anyway, the leader's word costs nothing extra.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

import torch

from .errors import Cancelled, PeerFailed
from .shared_buffer import SharedBuffer


class Phase(IntEnum):
    """What a rank is doing, for progress lines and time-out messages."""

    STARTING = 0
    IDLE = 1
    REPLAYING = 2
    LOADING = 3
    COMPUTING = 4

    @property
    def text(self) -> str:
        return ("starting", "idle", "running the graph", "loading weights", "computing")[self]


_CANCEL, _ABORT, _LEADER_GO, _LEADER_STOP = range(4)
_HEAD, _PER_RANK = 8, 16
_TICKS, _PHASE, _BLOCK, _BLOCKS, _WEIGHTS, _COLLECTIVE_SEQ, _ARRIVED, _LOADED, _SPARE = range(9)


class SharedState:
    """int64 slots: eight for all, then sixteen a rank."""

    def __init__(self, arena: SharedBuffer, world_size: int) -> None:
        self.arena, self.world_size = arena, world_size
        self._slots = arena.buffer(self.nbytes(world_size)).view(torch.int64).numpy()

    @staticmethod
    def nbytes(world_size: int) -> int:
        return 8 * (_HEAD + _PER_RANK * world_size)

    # -- coordinator ---------------------------------------------------------

    def request_cancel(self, request: int) -> None:
        self._slots[_CANCEL] = request

    def abort(self, request: int) -> None:
        """Release every rank that waits for a peer: some rank failed in this request."""
        self._slots[_ABORT] = request

    def ticks(self) -> list[int]:
        """A number a rank that grows whenever it gets somewhere."""
        return [int(self._slots[self._at(rank, _TICKS)]) for rank in range(self.world_size)]

    def arrived(self) -> int:
        """How many workers are up and wait for the control group."""
        return sum(int(self._slots[self._at(rank, _ARRIVED)]) for rank in range(self.world_size))

    def phase(self, rank: int) -> Phase:
        value = int(self._slots[self._at(rank, _PHASE)])
        return Phase(value) if 0 <= value < len(Phase) else Phase.STARTING

    def block(self, rank: int = 0) -> tuple[int, int]:
        """(blocks done, blocks in all) of the forward that the rank is in."""
        return int(self._slots[self._at(rank, _BLOCK)]), int(self._slots[self._at(rank, _BLOCKS)])

    def weights(self, rank: int) -> int:
        """Bytes of model weights that the rank holds on its device."""
        return int(self._slots[self._at(rank, _WEIGHTS)])

    def spare(self, rank: int) -> int:
        """Bytes of its device that the rank has already and could compute in."""
        return int(self._slots[self._at(rank, _SPARE)])

    def loaded(self, rank: int) -> int:
        """How much of the model that the rank is loading has arrived, in per cent."""
        return int(self._slots[self._at(rank, _LOADED)])

    def collective_seq(self, rank: int) -> int:
        """How many times in this request the rank came to where it meets the others. The lowest keeps them waiting."""
        return int(self._slots[self._at(rank, _COLLECTIVE_SEQ)])

    # -- ranks ---------------------------------------------------------------

    def arrive(self, rank: int) -> None:
        """The rank is ready to join the control group."""
        self._slots[self._at(rank, _ARRIVED)] = 1

    def begin(self, rank: int) -> None:
        """The rank starts on a request."""
        self._slots[self._at(rank, _COLLECTIVE_SEQ)] = 0
        self._slots[self._at(rank, _TICKS)] += 1

    def enter_collective(self, rank: int) -> None:
        """The rank is about to wait for others."""
        self._slots[self._at(rank, _COLLECTIVE_SEQ)] += 1

    def cancelled(self, request: int) -> bool:
        return bool(self._slots[_CANCEL] == request)

    def show_weights(self, rank: int, count: int) -> None:
        self._slots[self._at(rank, _WEIGHTS)] = count

    def show_spare(self, rank: int, count: int) -> None:
        self._slots[self._at(rank, _SPARE)] = count

    def show_loaded(self, rank: int, percent: int) -> None:
        if percent > self._slots[self._at(rank, _LOADED)]:
            self._slots[self._at(rank, _TICKS)] += 1  # a slow disk is not a rank that stands still
        self._slots[self._at(rank, _LOADED)] = percent

    def show(self, rank: int, phase: Phase, block: int = 0, blocks: int = 0) -> None:
        self._slots[self._at(rank, _PHASE)] = phase
        self._slots[self._at(rank, _BLOCK)] = block
        self._slots[self._at(rank, _BLOCKS)] = blocks
        self._slots[self._at(rank, _TICKS)] += 1

    def aborted(self, request: int) -> bool:
        return bool(self._slots[_ABORT] == request)

    def enter_block(self, rank: int, request: int, block: int, sleep: Callable[[float], None] = time.sleep) -> None:
        """Called by every rank before block ``block``; returns when the leader has entered it.

        Raises:
            Cancelled: on every rank at the same block.
            PeerFailed: another rank failed in this request.
        """
        # requests are positive and blocks fit 20 bits: one word orders all blocks of all requests
        ticket = (request << 20) | (block + 1)
        if rank == 0:
            if self._slots[_CANCEL] == request:
                self._slots[_LEADER_STOP] = ticket
                raise Cancelled
            self._slots[_LEADER_GO] = ticket
            return
        pause = 0.0
        while self._slots[_LEADER_GO] < ticket:
            if self._slots[_LEADER_STOP] == ticket:
                raise Cancelled
            if self.aborted(request):
                raise PeerFailed
            sleep(pause)
            pause = min(pause + 0.0001, 0.002)

    @staticmethod
    def _at(rank: int, slot: int) -> int:
        return _HEAD + _PER_RANK * rank + slot
