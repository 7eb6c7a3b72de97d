"""What a pool could leave behind: processes, memory files, its private directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

#: (device, inode)
MemoryFile = tuple[int, int]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def memory_files(processes: Iterable[int]) -> set[MemoryFile]:
    """Memory files of pools that these processes hold. They have no name: who holds none of them has left none."""
    found = set()
    for pid in processes:
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue  # it has ended, or is another user's
        for descriptor in descriptors:
            # a server opens and closes sockets all the time: one that is gone hides none of the others
            with contextlib.suppress(OSError):
                if os.readlink(descriptor).startswith("/memfd:sp-"):
                    file = descriptor.stat()
                    found.add((file.st_dev, file.st_ino))
    return found


def left(workers: Iterable[int], files: set[MemoryFile], directories: Iterable[Path]) -> list[str]:
    """What is still there of these, in words."""
    found = [f"worker {pid}" for pid in workers if alive(pid)]
    everybody = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    found += [f"memory file {file}" for file in files & memory_files(everybody)] if files else []
    return found + [str(directory) for directory in directories if directory.exists()]
