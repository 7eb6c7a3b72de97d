"""Shared memory between the processes of one pool.

The owner creates an anonymous memory file and the peers open it through
``/proc/<pid>/fd``: it needs no name, no room under /dev/shm, and vanishes with its last
process whatever way that dies. Where there is no memfd, a file in the pool's private
directory does the same job and goes with the directory.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor


class SharedBuffer:
    """A growable byte buffer that one process writes and others read."""

    def __init__(self, fd: int, path: str, size: int) -> None:
        self._fd, self.path = fd, path
        self._size = 0
        self._view: Tensor | None = None
        if size:
            self.reserve(size)

    @classmethod
    def create(cls, directory: Path, name: str, size: int = 0) -> SharedBuffer:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(f"sp-{name}", os.MFD_CLOEXEC)
            return cls(fd, f"/proc/{os.getpid()}/fd/{fd}", size)
        path = directory / name
        return cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), str(path), size)

    @classmethod
    def attach(cls, path: str) -> SharedBuffer:
        return cls(os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0)), path, 0)

    def reserve(self, size: int) -> None:
        """Owner: make the buffer at least ``size`` bytes. Its content may be lost to readers' old views."""
        if size > self._size:
            size = max(size, 2 * self._size, mmap.PAGESIZE)
            os.ftruncate(self._fd, size)
            self._map(size)

    def buffer(self, size: int) -> Tensor:
        """The first ``size`` bytes as a uint8 tensor; readers follow the owner's growth."""
        if size > self._size:
            actual = os.fstat(self._fd).st_size
            if size > actual:
                raise ValueError(f"the shared buffer has {actual} bytes, {size} were asked for")
            self._map(actual)
        assert self._view is not None
        return self._view[:size]

    def _map(self, size: int) -> None:
        # sampling grows the buffer in inference mode, and the unload button writes to it outside: a tensor that was
        # made in that mode would not allow it
        with torch.inference_mode(False):
            # an older mapping lives on while tensors still view it
            self._view = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)
        self._size = size

    def close(self) -> None:
        if self._fd >= 0:
            self._view = None
            self._size = 0
            os.close(self._fd)
            self._fd = -1
