"""How other processes tell whether the owner of a private directory is there: it holds a lock on a file in it.

The lock is a record lock of POSIX. The system drops it when the owner ends, and, as its descriptor closes on exec, when the
owner's process becomes another program. A process id stays the same then, and means nothing in another PID namespace that
shares the folder of temporary files. A child that the owner forks does not inherit the lock.

Such a lock also falls when its owner closes any other descriptor of the same file, so the owner never opens it a second time.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_NAME = "owner.lock"
#: every descriptor of this process, on Linux and on macOS
_OPEN_HERE = Path("/dev/fd")


class OwnerLock:
    """Held from its making until :meth:`release`; does nothing where the file system has no locks."""

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = None
        if sys.platform == "win32":
            return
        # The file gets its name when it is locked: under that name nobody finds it without an owner.
        unnamed = directory / f"{_NAME}.new"
        descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            unnamed.unlink(missing_ok=True)
            return
        unnamed.rename(directory / _NAME)
        self._descriptor = descriptor

    def release(self) -> None:
        """The owner needs the directory no more. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class OwnerWatch:
    """Another process's view of the lock in a directory."""

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = None
        if sys.platform != "win32" and _is_of_another(directory / _NAME):
            with contextlib.suppress(OSError):
                self._descriptor = os.open(directory / _NAME, os.O_RDONLY | os.O_CLOEXEC)

    def owner_is_there(self) -> bool | None:
        """Whether somebody holds the lock; None where there is none, or this process is the owner."""
        if self._descriptor is None or sys.platform == "win32":
            return None
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _is_of_another(path: Path) -> bool:
    """The file is there and this process has it not open: else opening and closing it once more would drop a lock on it.

    An owner has the file open before it gets its name, so what is found here by name is not about to be opened.
    """
    try:
        file = path.stat()
        descriptors = [int(entry) for entry in os.listdir(_OPEN_HERE)]
    except OSError:
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), file):
                return False
    return True
