"""Brings what the workers write to the coordinator's console, each line with its rank.

The workers write to files and not to pipes: a busy coordinator then never makes them wait,
and their last words outlive it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

#: how often the log files are read
LOG_POLL_S = 0.1


def _to_console(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class _Tail:
    """Reads on in one file, whole lines only."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank, self._file, self._partial = rank, path.open("rb"), b""

    def new_lines(self, last: bool) -> str:
        """What was added since the last call; a line that has no end yet only if this is the ``last`` call."""
        *lines, self._partial = (self._partial + self._file.read()).split(b"\n")
        if last:
            lines.append(self._partial)
            self._file.close()
        return "".join(f"[SP rank {self.rank}] {line.decode(errors='replace')}\n" for line in lines if line.strip())


class Console:
    """Follows the log files of all ranks in one daemon thread, which nobody waits for when the program ends."""

    def __init__(self, files: Mapping[int, Iterable[Path]], write: Callable[[str], None] = _to_console) -> None:
        self._tails = [_Tail(rank, path) for rank, paths in files.items() for path in paths]
        self._write = write
        #: two readers would write the same lines twice
        self._reading = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="sp-console", daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Write what is still unread, so that a failure's trace stands above the sentence that tells of it."""
        self._read()

    def close(self) -> None:
        """Write what is still unread, and end."""
        self._stop.set()
        self._thread.join(2)

    def _follow(self) -> None:
        while not self._stop.wait(LOG_POLL_S):
            self._read()
        self._read(last=True)

    def _read(self, last: bool = False) -> None:
        with self._reading:
            for tail in self._tails:
                if text := tail.new_lines(last):
                    self._write(text)
            if last:
                self._tails.clear()
