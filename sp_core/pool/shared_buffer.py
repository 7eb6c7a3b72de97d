"""A growable byte buffer in memory that the processes of one pool share, see :mod:`..memory_file`."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from .. import memory_file


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
        """A new buffer that this process owns; it is a file in ``directory`` only where there are no memory files."""
        if memory_file.available():
            fd = memory_file.create(f"sp-{name}")
            return cls(fd, memory_file.path_of(fd), size)
        path = directory / name
        return cls(memory_file.create_at(path), str(path), size)

    @classmethod
    def attach(cls, path: str) -> SharedBuffer:
        """The buffer that another process created, by the owner's ``path``."""
        return cls(memory_file.attach(path), path, 0)

    def reserve(self, size: int) -> None:
        """The owner makes the buffer at least ``size`` bytes. A view that a reader took before may not see what is written after."""
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
        # Sampling grows the buffer in inference mode and the unload button writes to it outside that mode: torch would
        # refuse that for a tensor that was made in inference mode.
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
