"""Brings what the workers write to this process's console, each line with its rank.

torch's launcher can do that too, but with threads that Python waits for at exit, before
anybody gets the chance to end the workers whose output they wait for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

POLL_S = 0.1


def _to_console(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Console:
    """Follows the log files of all ranks in one daemon thread."""

    def __init__(self, files: Mapping[int, list[str]], write: Callable[[str], None] = _to_console) -> None:
        self._open = [(rank, Path(path)) for rank, paths in files.items() for path in paths]
        self._offsets = dict.fromkeys((path for _, path in self._open), 0)
        self._partial = dict.fromkeys(self._offsets, b"")
        self._write = write
        #: two readers would write the same lines twice
        self._reading = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="sp-console", daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Write what is still unread; so a failure's trace stands above the sentence that it ends in."""
        self._read()

    def close(self) -> None:
        """Write what is still unread, and end."""
        self._stop.set()
        self._thread.join(2)

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            self._read()
        self._read(last=True)

    def _read(self, last: bool = False) -> None:
        with self._reading:
            for rank, path in self._open:
                self._bring(rank, path, last)

    def _bring(self, rank: int, path: Path, last: bool) -> None:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                data = file.read()
        except OSError:
            return  # not written yet, or gone with the pool
        self._offsets[path] += len(data)
        *lines, rest = (self._partial[path] + data).split(b"\n")
        if last and rest:
            lines, rest = [*lines, rest], b""
        self._partial[path] = rest
        text = "".join(f"[SP rank {rank}] {line.decode(errors='replace')}\n" for line in lines if line.strip())
        if text:
            self._write(text)
