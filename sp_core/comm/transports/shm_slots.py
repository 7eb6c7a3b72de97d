"""Receive slots inside one shared file: handed out, lent to tensors, reused, given back to the system."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import weakref
from collections import deque
from dataclasses import dataclass

#: madvise: fault pages in for writing and report a lack of memory instead of killing the process (Linux 5.14)
_POPULATE_WRITE = 23
_HUGE_PAGE = 2 << 20
_SMALLEST = 64 << 10
#: a free slot goes back to the system at the take of another size by which so many takes have not wanted it
_IDLE_TAKES = 17


@dataclass(eq=False)
class Slot:
    """``capacity`` bytes at ``offset`` of the file, mapped in this process."""

    offset: int
    capacity: int
    mapping: mmap.mmap
    used_at: int = 0


class OwnSlots:
    """The slots of one rank. Used by one thread; leases may end on any thread, at any time.

    Args:
        file: descriptor of the shared file; grown here and never closed.
        start: bytes at the start of the file that are not for slots.
    """

    def __init__(self, file: int, start: int) -> None:
        self._file = file
        self._start = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        self._slots: list[Slot] = []  # by offset
        self._free: list[Slot] = []
        # appended to by finalizers, which may run inside any of our own lines: only atomic operations
        self._ended: deque[Slot] = deque()
        self._takes = 0
        #: as :data:`_IDLE_TAKES`; 0 keeps no free slot when another size is taken
        self.idle_takes = _IDLE_TAKES

    def take(self, size: int) -> Slot:
        """A slot of at least ``size`` bytes that nobody uses.

        Raises:
            MemoryError: the system has no memory for it.
        """
        self._takes += 1
        while self._ended:
            self.give_back(self._ended.popleft())
        capacity = rounded_capacity(size)
        fitting = [slot for slot in self._free if capacity <= slot.capacity <= 2 * capacity]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.capacity)
            self._free.remove(slot)
        else:
            for idle in [slot for slot in self._free if slot.used_at <= self._takes - self.idle_takes]:
                self._drop(idle)
            slot = self._create(capacity)
        return slot

    def give_back(self, slot: Slot) -> None:
        slot.used_at = self._takes
        self._free.append(slot)

    def lend(self, slot: Slot) -> memoryview:
        """The slot's memory; the slot comes back when the last user of this very object is gone."""
        lease = memoryview(slot.mapping)
        weakref.finalize(lease, self._ended.append, slot).atexit = False
        return lease

    def close(self) -> None:
        """Lets go of everything that no tensor uses; the rest follows its tensors."""
        while self._ended:
            self.give_back(self._ended.popleft())
        for slot in list(self._free):
            self._drop(slot)
        self._slots.clear()

    def _drop(self, slot: Slot) -> None:
        self._free.remove(slot)
        self._slots.remove(slot)
        slot.mapping.madvise(mmap.MADV_REMOVE)  # frees the pages although peers still map the file
        slot.mapping.close()

    def _create(self, capacity: int) -> Slot:
        alignment = _HUGE_PAGE if capacity >= _HUGE_PAGE else _SMALLEST
        place, offset = 0, self._start
        for place, other in enumerate([*self._slots, None]):  # noqa: B007
            if other is None or offset + capacity <= other.offset:
                break
            offset = -(-(other.offset + other.capacity) // alignment) * alignment
        if offset + capacity > os.fstat(self._file).st_size:
            os.ftruncate(self._file, offset + capacity)
        mapping = self._map(offset, capacity)
        slot = Slot(offset, capacity, mapping)
        self._slots.insert(place, slot)
        return slot

    def _map(self, offset: int, capacity: int) -> mmap.mmap:
        untracked = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        mapping = mmap.mmap(self._file, capacity, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset, **untracked)
        try:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                _advise_if_known(mapping, mmap.MADV_HUGEPAGE)
            if not _advise_if_known(mapping, _POPULATE_WRITE):
                os.posix_fallocate(self._file, offset, capacity)
        except OSError as error:
            mapping.close()
            raise MemoryError(f"no memory for an exchange buffer of {capacity / 1e6:.1f} MB ({error.strerror})") from error
        return mapping


def rounded_capacity(size: int) -> int:
    """``size`` bytes rounded up by at most an eighth, so that slots of similar sizes are interchangeable."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = max(1 << (size.bit_length() - 4), 4096)
    return -(-size // step) * step


def _advise_if_known(mapping: mmap.mmap, advice: int) -> bool:
    try:
        mapping.madvise(advice)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True
