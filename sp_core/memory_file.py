"""Memory that processes share as a file without a name, or as a file in a private directory where there is none.

An anonymous memory file needs no name and no room under /dev/shm, and it vanishes with the last process that holds it,
whatever way that process dies. Other processes open it through its owner's entry in /proc.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0)


def available() -> bool:
    """This system has anonymous memory files."""
    return hasattr(os, "memfd_create")


def create(name: str) -> int:
    """File descriptor of a new, empty memory file; the name only shows up in /proc.

    Raises:
        OSError: the system has none, or gives none.
    """
    if not available():
        raise OSError(errno.ENOSYS, "this system has no anonymous memory files")
    return os.memfd_create(name, os.MFD_CLOEXEC)


def path_of(descriptor: int, pid: int | None = None) -> str:
    """Where other processes open a memory file of process ``pid`` (default: this one)."""
    return f"/proc/{os.getpid() if pid is None else pid}/fd/{descriptor}"


def create_at(path: str | Path) -> int:
    """File descriptor of a new, empty file that only this user can open.

    Raises:
        OSError: it is there already, or cannot be made.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _CLOSED_ON_EXEC, 0o600)


def attach(path: str | Path) -> int:
    """File descriptor for a file that another process made.

    Raises:
        OSError: it is gone, or may not be opened.
    """
    return os.open(path, os.O_RDWR | _CLOSED_ON_EXEC)
