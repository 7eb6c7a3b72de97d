"""Copies that the processes of a machine share: who needs one first makes it, and the others map it.

A store is a memory file that grows, an index of it in a private directory, and a lock. The file lives as long as a
process that uses it; a store whose maker is gone is begun anew by the next one that needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from . import memory_file
from .mapped_file import FileRange

_PAGE = 4096


class CopyStore:
    """The copies of one group, for the processes that see ``directory``.

    Args:
        directory: private, and seen by all processes that share copies.
        group: what the copies are of: they leave main memory together, once no process has the store.
    """

    def __init__(self, directory: str | Path, group: str) -> None:
        name = f"weights-{hashlib.sha256(group.encode()).hexdigest()[:16]}"
        self._index, self._lock = Path(directory) / f"{name}.index", Path(directory) / f"{name}.lock"
        self._descriptor: int | None = None
        self._places: dict[str, FileRange] = {}

    @staticmethod
    def available() -> bool:
        """This system has what a store needs."""
        return memory_file.available()

    def range_of(self, key: str, make: Callable[[], Tensor]) -> FileRange:
        """Where the copy ``key`` lies.

        Args:
            make: gives the copy, a contiguous tensor on the CPU, if no process has made it yet.

        Raises:
            OSError: there is no room for it.
        """
        with self._locked():
            self._join()
            if key not in self._places:
                self._add(key, make())
            return self._places[key]

    def close(self) -> None:
        """This process makes and finds no more copies. What it has mapped stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._places.clear()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # Windows has none, and no memory files either

        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _join(self) -> None:
        """Know what other processes have made, in the store that is in use now."""
        lines = self._index.read_text().splitlines() if self._index.exists() else []
        head = json.loads(lines[0]) if lines else None
        if self._descriptor is not None and head is not None and os.fstat(self._descriptor).st_ino == head["inode"]:
            self._read(head, lines[1:])
            return
        self.close()
        if head is not None:
            with contextlib.suppress(OSError):
                descriptor = memory_file.attach(head["path"])
                if os.fstat(descriptor).st_ino == head["inode"]:
                    self._descriptor = descriptor
                    self._read(head, lines[1:])
                    return
                os.close(descriptor)
        self._descriptor = memory_file.create("sp-weights")
        head = {"path": memory_file.path_of(self._descriptor), "inode": os.fstat(self._descriptor).st_ino}
        self._write(json.dumps(head) + "\n", "w")

    def _read(self, head: dict[str, object], lines: list[str]) -> None:
        for line in lines[len(self._places) :]:
            key, offset, nbytes = json.loads(line)
            self._places[key] = FileRange(str(head["path"]), int(head["inode"]), offset, nbytes)  # type: ignore[call-overload]

    def _add(self, key: str, copy: Tensor) -> None:
        assert self._descriptor is not None
        view = memoryview(copy.detach().reshape(-1).view(torch.uint8).numpy().data)
        offset = -(-os.fstat(self._descriptor).st_size // _PAGE) * _PAGE
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done : done + (1 << 30)], offset + done)
        head = json.loads(self._index.read_text().splitlines()[0])
        self._write(json.dumps([key, offset, len(view)]) + "\n", "a")
        self._places[key] = FileRange(head["path"], head["inode"], offset, len(view))

    def _write(self, text: str, mode: str) -> None:
        with open(os.open(self._index, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if mode == "w" else os.O_APPEND), 0o600), mode) as index:
            index.write(text)
