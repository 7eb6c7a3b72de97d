"""What whoever reads a measurement should know of the machine that it was made on."""

from __future__ import annotations

import os


def machine_line() -> str:
    """Cores and how busy they are. On a busy machine, threads of one process lose more time than as many processes."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = "; busy with other work, so times are of little use" if load > 2 * cores else ""
    return f"{cores} cores, load {load:.1f}{busy}"
