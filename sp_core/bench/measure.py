"""What the benchmarks share: taking turns, and a ComfyUI of their own."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..demo.checkpoints import Checkpoint
from ..demo.comfy_server import DEMO_NODES, ComfyServer, prepare_base, prompt_seconds
from ..host_path import find_comfyui


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


def turns(methods: Mapping[str, Callable[[], float]], samples: int, warm_up: int = 1) -> dict[str, float]:
    """Median of what each method returns; they take turns, so that a busy machine is equally busy for all."""
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(warm_up + samples):
        for name, method in methods.items():
            value = method()
            if number >= warm_up:
                taken[name].append(value)
    return {name: median(values) for name, values in taken.items()}


@contextlib.contextmanager
def comfyui(
    checkpoints: Mapping[str, Checkpoint], devices_are_cpu: bool = True, environment: dict[str, str] | None = None
) -> Iterator[ComfyServer | None]:
    """A headless ComfyUI with the demo's nodes and checkpoints, and with ``checkpoints``; None when there is no checkout."""
    host = find_comfyui()
    if host is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="sp-bench-") as folder:
        base = Path(folder)
        prepare_base(host, base, [DEMO_NODES], checkpoints)
        with ComfyServer(host, base, "--cpu" if devices_are_cpu else "--force-fp32", environment=environment) as server:
            yield server


def seconds_of(server: ComfyServer, prompt: dict[str, Any]) -> float:
    """Seconds that a prompt takes from ComfyUI's start of it to its end."""
    return prompt_seconds(server.wait(server.queue(prompt), timeout=900))
