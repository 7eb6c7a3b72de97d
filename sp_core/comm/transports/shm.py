"""Exchange between CPU ranks of one machine by shared memory: one copy, straight to its final place.

Each rank owns one memory file. Peers open it as ``/proc/<pid>/fd/<n>``: such a file has no name that could outlive a
``kill -9``, does not count against the size of ``/dev/shm`` (64 MB in a default container), and needs no listening
socket. Where /proc is closed to us the file lies, already unlinked, in the pool's private directory. The protocol is
described in ``csrc/all2all_cpu.cpp``.

Outputs are views of receive slots. A slot is lent to its tensors and is granted to the peers again only after the last
tensor is gone, so callers own what they get: they may keep it and write to it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import time
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ... import memory_file
from ...settings import DEFAULT_STALL_TIMEOUT_S, STALL_TIMEOUT
from ..errors import ExchangeError, TransportUnavailable, ranks_text
from ..native.addresses import MAX_WORLD
from ..native.build import load_cpu
from ..native.cpu import ExchangeStatus, bind
from ..small_collectives import all_gather_ints, raise_together
from ..transport import Slots
from .exchange_transport import ExchangeTransport, PreparedExchange, other_exchange
from .shm_slots import OwnSlots, Slot

#: milliseconds between two looks at the peers' health and at ``should_abort``
_PEERS_POLL_MS = 50
#: bytes; below this a copy is cheaper than lending a slot
_COPY_BELOW = 32 << 10
_FIRST_MAPPING = 2 << 20
#: one is being filled and two are granted ahead; where little is held, none is granted ahead
_SLOTS, _ONE_SLOT = Slots(count=3), Slots(count=1)


class ShmTransport(ExchangeTransport):
    """Shared-memory exchange of CPU tensors. Made by :meth:`create` on all ranks of a group at once."""

    name = "shm"
    device_type = "cpu"

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        directory: str | Path | None = None,
        timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
        should_abort: Callable[[], str | None] | None = None,
    ) -> ShmTransport:
        """Collective over ``group``.

        Args:
            directory: private directory of the pool, used only where ranks cannot reach each other through /proc.
            timeout_s: seconds after which a wait for other ranks is an error.
            should_abort: asked about every 50 ms during a wait; a text that it returns ends the wait with that text.

        Raises:
            TransportUnavailable: on every rank alike, if any rank cannot take part.
        """
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        handle, reason = load_cpu()
        if world_size > MAX_WORLD:
            reason = f"the shared-memory exchange joins at most {MAX_WORLD} ranks"
        raise_together(group, reason and f"rank {rank}: {reason}")
        assert handle is not None
        library = bind(handle)
        nonce = all_gather_ints(group, [secrets.randbits(62)])[0][0]
        failure: TransportUnavailable | None = None
        for reach in (_reach_by_proc, _reach_by_directory):
            file, opened, problem = reach(group, rank, world_size, nonce, directory, library.sp_prepare)
            context = None
            if not problem:
                culprit = c_int(-1)
                context = library.sp_join(rank, world_size, nonce, (c_int * world_size)(*opened), None, _FIRST_MAPPING, culprit)
                problem = "" if context else f"opened a file that is not the exchange memory of rank {culprit.value}"
            for other in opened:
                os.close(other)
            try:
                raise_together(group, problem and f"rank {rank}: {problem}")
            except TransportUnavailable as error:
                failure = error
                if context:
                    library.sp_leave(context)
                if file >= 0:
                    os.close(file)
                continue
            pids = [pid for (pid,) in all_gather_ints(group, [os.getpid()])]
            assert context is not None
            return cls(rank, world_size, library, context, file, pids, timeout_s=timeout_s, should_abort=should_abort)
        assert failure is not None
        raise failure

    def __init__(
        self,
        rank: int,
        world_size: int,
        library: ctypes.CDLL,
        context: int,
        file: int,
        pids: Sequence[int],
        *,
        timeout_s: float,
        should_abort: Callable[[], str | None] | None,
    ) -> None:
        super().__init__(rank, world_size)
        self.timeout_s = timeout_s
        self.should_abort = should_abort
        self.own_slots = OwnSlots(file, library.sp_header_bytes())
        self._library = library
        self._context = context
        self._file = file
        self._peers = _Peers(rank, pids)
        self._granted: dict[int, Slot] = {}
        self._sizes = _SizeMemory()
        self._grants_ahead = True

    def reserve(self, size: int) -> Slots:
        return _SLOTS if self._grants_ahead else _ONE_SLOT

    def hold_little(self) -> None:
        self._grants_ahead = False
        self.own_slots.idle_takes = 0

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._library.sp_tell(self._context, 0, f"rank {self.rank} has closed its exchange".encode())
        self._library.sp_leave(self._context)
        for slot in self._granted.values():
            self.own_slots.give_back(slot)
        self._granted.clear()
        self.own_slots.close()
        self._peers.close()
        os.close(self._file)

    def _move(self, prepared: PreparedExchange, tensors: Sequence[Tensor]) -> list[Tensor]:
        n = len(tensors)
        self._library.sp_start(
            self._context,
            self._epoch,
            prepared.native,
            prepared.signature,
            (c_void_p * n)(*(tensor.data_ptr() for tensor in tensors)),
            (c_int64 * n)(*(tensor.stride(0) * tensor.element_size() for tensor in tensors)),
            (c_int64 * n)(*(tensor.stride(1) * tensor.element_size() for tensor in tensors)),
        )
        need = prepared.slot_bytes
        slot = self._granted.pop(self._epoch, None)
        if need and (slot is None or slot.capacity < need):
            if slot is not None:
                self.own_slots.give_back(slot)
            slot = self._grant(self._epoch, need, second=True)
        self._wait()
        self._sizes.record(need)
        outputs = self._outputs(slot, prepared)
        if self._grants_ahead and (expected := self._sizes.expected_after_next()):
            self._granted[self._epoch + 2] = self._grant(self._epoch + 2, expected, second=False)
        return outputs

    def _grant(self, epoch: int, size: int, *, second: bool) -> Slot:
        try:
            slot = self.own_slots.take(size)
        except MemoryError as error:
            self._fail(ExchangeError(f"rank {self.rank} has {error}", self.rank))
        self._library.sp_grant(self._context, epoch, second, slot.offset, slot.capacity)
        return slot

    def _outputs(self, slot: Slot | None, prepared: PreparedExchange) -> list[Tensor]:
        size, count = prepared.output_bytes, prepared.exchange.tensors
        if slot is None or size == 0:
            if slot is not None:
                self.own_slots.give_back(slot)
            return [torch.empty(prepared.shape, dtype=prepared.dtype) for _ in range(count)]
        lease = self.own_slots.lend(slot)
        offsets = [index * prepared.tensor_stride for index in range(count)]
        parts = [torch.frombuffer(lease, dtype=torch.uint8, count=size, offset=offset) for offset in offsets]
        views = [part.view(prepared.dtype).view(prepared.shape) for part in parts]
        # a small output that is kept for long must not keep a large slot
        small = prepared.slot_bytes < _COPY_BELOW or 2 * prepared.slot_bytes < slot.capacity
        return [view.clone() for view in views] if small else views

    def _wait(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            status = self._library.sp_advance(self._context, _PEERS_POLL_MS)
            if status == ExchangeStatus.DONE:
                return
            if status != ExchangeStatus.WAITING:
                self._explain(status)
            late = [rank for rank in range(self.world_size) if self._library.sp_late(self._context) >> rank & 1]
            for rank in late:
                if self._peers.is_gone(rank):
                    self._fail(ExchangeError(f"rank {rank} (process {self._peers.pids[rank]}) has ended during an exchange", rank))
            if self.should_abort is not None and (text := self.should_abort()):
                self._fail(ExchangeError(text))
            if time.monotonic() > deadline:
                self._fail(
                    ExchangeError(
                        f"{ranks_text(late)} {'is' if len(late) == 1 else 'are'} late: "
                        f"rank {self.rank} has waited {self.timeout_s:g} s in exchange {self._epoch}; "
                        f"look into that rank's log, or raise {STALL_TIMEOUT}",
                        late[0] if len(late) == 1 else None,
                    )
                )

    def _explain(self, status: int) -> NoReturn:
        rank = self._library.sp_culprit(self._context)
        if status == ExchangeStatus.MISMATCH:
            mine, theirs = (self._library.sp_signature(self._context, other) for other in (self.rank, rank))
            self._fail(other_exchange(self._epoch, self.rank, mine, rank, theirs))
        if status == ExchangeStatus.PEER_FAILED:
            message = self._library.sp_message(self._context, rank).decode(errors="replace")
            self._fail(ExchangeError(f"rank {rank} gave up: {message}", rank))
        self._fail(ExchangeError(f"rank {self.rank} could not map the exchange buffer of rank {rank}: out of address space", self.rank))

    def _tell_peers(self, message: str) -> None:
        self._library.sp_tell(self._context, 1, message.encode())


class _Peers:
    """Whether the processes of the peers live, told by process descriptors, which outlive a reuse of the process number."""

    def __init__(self, rank: int, pids: Sequence[int]) -> None:
        self.pids = list(pids)
        self._descriptors: dict[int, int] = {}
        for other, pid in enumerate(pids):
            if pid == os.getpid():
                continue
            try:
                self._descriptors[other] = os.pidfd_open(pid)
            except OSError:  # an old kernel, or already gone: asked by number instead
                continue

    def is_gone(self, rank: int) -> bool:
        if (descriptor := self._descriptors.get(rank)) is not None:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(0))
        try:
            os.kill(self.pids[rank], 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


class _SizeMemory:
    """Guesses the size of the exchange after the next one: a model repeats the sequence of its blocks."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._followed: dict[tuple[int, int], int] = {}

    def record(self, size: int) -> None:
        self._last = [*self._last[-3:], size]
        if len(self._last) == 4:
            self._followed[self._last[0], self._last[1]] = size
            if len(self._followed) > 1024:
                self._followed.clear()

    def expected_after_next(self) -> int:
        last = self._last[-1]
        return self._followed.get((self._last[-2], last), last) if len(self._last) > 1 else last


def _prepare(file: int, rank: int, world_size: int, nonce: int, prepare: Callable[..., None]) -> None:
    os.ftruncate(file, _FIRST_MAPPING)
    with mmap.mmap(file, _FIRST_MAPPING) as mapping:
        anchor = ctypes.c_char.from_buffer(mapping)
        prepare(ctypes.addressof(anchor), rank, world_size, nonce)
        del anchor


def _reach_by_proc(
    group: dist.ProcessGroup | None, rank: int, world_size: int, nonce: int, directory: str | Path | None, prepare: Callable[..., None]
) -> tuple[int, list[int], str]:
    """(own file, everybody's file, problem): memory files, opened through the owner's /proc entry."""
    file, problem = -1, ""
    try:
        file = memory_file.create("sp_exchange")
        _prepare(file, rank, world_size, nonce, prepare)
    except OSError as error:
        problem = f"no memory file could be made ({error.strerror})"
    places = all_gather_ints(group, [os.getpid(), file])
    opened: list[int] = []
    try:
        for pid, number in places:
            opened.append(memory_file.attach(memory_file.path_of(number, pid)))
    except OSError as error:
        problem = problem or f"the memory of rank {len(opened)} cannot be opened through /proc ({error.strerror})"
    return file, opened, problem


def _reach_by_directory(
    group: dist.ProcessGroup | None, rank: int, world_size: int, nonce: int, directory: str | Path | None, prepare: Callable[..., None]
) -> tuple[int, list[int], str]:
    """The same with files in the private directory, which lose their names as soon as everybody has opened them."""
    if directory is None:
        return -1, [], "ranks cannot reach each other's memory through /proc and there is no private directory"
    paths = [Path(directory) / f"exchange-{nonce:x}-{other}" for other in range(world_size)]
    file, problem = -1, ""
    opened: list[int] = []
    try:
        file = memory_file.create_at(paths[rank])
        _prepare(file, rank, world_size, nonce, prepare)
    except OSError as error:
        problem = f"no exchange file could be made in {directory} ({error.strerror})"
    all_gather_ints(group, [0])
    try:
        for path in paths:
            opened.append(memory_file.attach(path))
    except OSError as error:
        problem = problem or f"the exchange file of rank {len(opened)} cannot be opened ({error.strerror})"
    all_gather_ints(group, [0])
    paths[rank].unlink(missing_ok=True)
    return file, opened, problem
