"""Tensors that lie in a mapped file: which file that is, and the same bytes in another process without a copy.

A mapping is private: who writes into it gets pages of his own, and neither the file nor another process sees it. All
that only read share the pages. Linux tells what a process has mapped; elsewhere no tensor lies in a file as far as
this module knows.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .memory_file import path_of

_MAPS, _SMAPS, _DESCRIPTORS = "/proc/self/maps", "/proc/self/smaps", "/proc/self/fd"
_MEMORY_FILE, _DELETED = "/memfd:", " (deleted)"
_DONT_NEED = 4


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file. ``path`` can be that of a process's open file, below /proc."""

    path: str
    inode: int
    offset: int
    nbytes: int

    def mapped(self) -> Tensor:
        """The bytes, (nbytes,) uint8, shared with every process that has mapped them.

        Raises:
            OSError: the file is gone, or another one has its path now.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != self.inode:
                raise FileNotFoundError(self.path)
            start = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(descriptor, self.offset - start + self.nbytes, access=mmap.ACCESS_COPY, offset=start)
        finally:
            os.close(descriptor)
        return torch.frombuffer(mapping, dtype=torch.uint8, count=self.nbytes, offset=self.offset - start)


@dataclass(frozen=True)
class _Mapping:
    start: int
    end: int
    offset: int
    path: str


class Mappings:
    """The files that this process has mapped, as of now."""

    def __init__(self) -> None:
        self._mappings = _read_maps()
        self._starts = [mapping.start for mapping in self._mappings]
        self._inodes: dict[str, int] = {}

    def range_of(self, tensor: Tensor) -> FileRange | None:
        """Where the bytes of a contiguous plain tensor lie in a file; None where they lie in no file that can be opened.

        Raises:
            OSError: the file is gone.
        """
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or self._mappings[at].end < address + nbytes:
            return None
        found = self._mappings[at]
        if found.path not in self._inodes:
            # not the one of the mapping: layered file systems have others there
            self._inodes[found.path] = os.stat(found.path).st_ino
        return FileRange(found.path, self._inodes[found.path], found.offset + address - found.start, nbytes)

    def maps(self, tensor: Tensor) -> bool:
        """The bytes of this tensor lie in a mapped file."""
        at = bisect.bisect_right(self._starts, tensor.data_ptr()) - 1
        return at >= 0 and tensor.data_ptr() < self._mappings[at].end


def _read_maps() -> list[_Mapping]:
    try:
        with open(_MAPS) as maps:
            lines = maps.read().splitlines()
    except OSError:
        return []
    found, memory_files = [], _own_memory_files()
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        path = memory_files.get(int(fields[4])) if fields[5].startswith(_MEMORY_FILE) else fields[5]
        if path is not None and not path.endswith(_DELETED):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            found.append(_Mapping(start, end, int(fields[2], 16), path))
    return found


def _own_memory_files() -> dict[int, str]:
    """Where other processes open the memory files of this one, by inode."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):
            if os.readlink(f"{_DESCRIPTORS}/{name}").startswith(_MEMORY_FILE):
                found[os.fstat(int(name)).st_ino] = path_of(int(name))
    return found


def let_pages_go(tensors: Iterable[Tensor]) -> None:
    """Take the pages of mapped files out of this process's memory that nobody has written; they are read again when they are used.

    The system keeps them as long as it has room. A mapping in which some page was written stays as it is.
    """
    written = _written_mappings()
    if written is None:
        return
    madvise = ctypes.CDLL(None).madvise
    starts = [start for start, _, _ in written]
    for tensor in tensors:
        address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        at = bisect.bisect_right(starts, address) - 1
        if nbytes == 0 or at < 0 or written[at][1] < address + nbytes or written[at][2]:
            continue
        page = mmap.PAGESIZE
        first, last = -(-address // page) * page, (address + nbytes) // page * page
        if last > first:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONT_NEED)


def give_back_freed() -> None:
    """Give memory back to the system that this process has freed, which the C library keeps for later otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # of glibc
        trim(ctypes.c_size_t(0))


def _written_mappings() -> list[tuple[int, int, bool]] | None:
    """(start, end, whether a page of it is this process's own) of every mapped file."""
    try:
        with open(_SMAPS) as smaps:
            lines = smaps.read().splitlines()
    except OSError:
        return None
    found: list[tuple[int, int, bool]] = []
    inside = False
    for line in lines:
        fields = line.split(maxsplit=5)
        if "-" in fields[0] and len(fields) >= 5 and not fields[0].endswith(":"):
            inside = len(fields) == 6 and fields[5].startswith("/")
            if inside:
                start, end = (int(address, 16) for address in fields[0].split("-"))
                found.append((start, end, False))
        elif inside and fields[0] == "Anonymous:" and fields[1] != "0":
            found[-1] = (*found[-1][:2], True)
    return found
