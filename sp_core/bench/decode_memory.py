"""How far a CPU worker's memory rises in a decode, against one process that decodes the whole frame.

What counts is the rise over what the process holds at rest, with weights and buffers. It is Linux's own peak of the resident
set, which the benchmark resets before each decode, so nothing is missed between two looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

#: has glibc give back every large block at once; else a rise would hide in what an earlier decode has left
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Megabytes (10^6 bytes) over what each holds at rest; of the workers the one with most."""

    video: str
    workers: int
    one_process_mb: float
    worker_mb: float

    @property
    def ratio(self) -> float:
        """A worker's rise against its share of the one process's."""
        return self.worker_mb * self.workers / self.one_process_mb


def rises(
    pids: Mapping[str, Callable[[], list[int]]], decode: Mapping[str, Callable[[], object]], rest: Callable[[], object], samples: int
) -> dict[str, float]:
    """Median rise in MB of the process with most, for each way to decode; the first decode of each warms up.

    Args:
        pids: the processes that are looked at, which there are after the first decode.
        decode: has them decode a new video.
        rest: has them let go of the video before, which one process would hold twice otherwise.
    """
    found: dict[str, list[float]] = {way: [] for way in decode}
    for number in range(samples + 1):
        for way, run in decode.items():
            if not number:
                run()
                continue
            rest()
            before = {pid: _at_rest_mb(pid) for pid in pids[way]()}
            run()
            found[way].append(max(_status_mb(pid, "VmHWM") - mb for pid, mb in before.items()))
    return {way: median(values) for way, values in found.items()}


def _at_rest_mb(pid: int) -> float:
    """What a process holds now, which becomes its peak so far."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status_mb(pid, "VmRSS")


def _status_mb(pid: int, name: str) -> float:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024 / 1e6
