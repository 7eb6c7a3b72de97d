"""Words about this machine for whoever reads a measurement."""

from __future__ import annotations

import os


def machine_line() -> str:
    """Cores and how busy they are: several threads of one process suffer more from a busy machine than several processes."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = "; busy with other work, so times are of little use" if load > 2 * cores else ""
    return f"{cores} cores, load {load:.1f}{busy}"
