"""What the operating system knows of a process.

Read from /proc: psutil is a requirement of ComfyUI and not of this package, so nothing below host/ may need it.
"""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes(pid: int) -> int | None:
    """Main memory that the process holds; None where the system does not say, or the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
