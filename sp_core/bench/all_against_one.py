"""N CPU workers together against one process that has all their threads."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AllAgainstOne:
    """The workers together against one process that has as many threads as all of them. Medians in seconds."""

    workers: int
    threads: int
    one_process_s: float
    workers_s: float

    @property
    def ratio(self) -> float:
        return self.workers_s / self.one_process_s


def threads_of_all(workers: int) -> int:
    """All workers' threads, as the launcher gives them out."""
    return workers * max(1, (os.cpu_count() or 1) // workers)


def environment_of_one(workers: int) -> dict[str, str]:
    """Of a ComfyUI that is the one process, so that a number of threads that the caller's environment holds does not count."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads_of_all(workers)))
