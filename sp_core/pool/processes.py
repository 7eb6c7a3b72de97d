"""What the operating system knows of a process, without anything to install."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes(pid: int) -> int | None:
    """Main memory that the process holds; None where the system does not say, or the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
