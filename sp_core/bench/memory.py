"""Private memory of CPU workers that hold one large checkpoint: does each have a copy, or do they share the file's pages?

What counts is anonymous memory, which no other process can share; pages of a mapped file are not
in it. A worker with a tiny checkpoint is the base. ComfyUI by itself, in prompts without SP, is
measured first: what it copies, a worker copies too, because a worker is a ComfyUI. Needs Linux and ComfyUI.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from ..demo.comfy_server import ComfyServer
from ..demo.machine_line import machine_line
from ..demo.tiny import shrink
from .models import LARGE, LARGE_CHECKPOINT, ONE_STEP
from .prompts import comfyui

#: what must be free on the disk: the checkpoint, and something to spare
_DISK_BYTES = 3 << 30


@dataclass(frozen=True)
class Result:
    """Megabytes (10^6 bytes)."""

    workers: int
    checkpoint_mb: float
    base_mb: float
    loaded_mb: float
    #: ComfyUI's own process, before any worker was started
    host_base_mb: float
    host_loaded_mb: float

    @property
    def limit_mb(self) -> float:
        return self.workers * self.base_mb + 0.3 * self.checkpoint_mb

    @property
    def total_mb(self) -> float:
        return self.workers * self.loaded_mb

    def verdict(self) -> str:
        """What the host's own growth says about where a copy comes from."""
        copied = (self.host_loaded_mb - self.host_base_mb) / self.checkpoint_mb
        if copied > 0.7:
            return f"it copies {copied:.0%} of the file by itself, in a prompt that knows nothing of workers"
        return f"it copies {copied:.0%} of the file by itself; what a worker has beyond that is this extension's"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench memory``; 0 if it could be measured."""
    parser = argparse.ArgumentParser(prog="bench memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=4, help="CPU workers (default 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    if not sys.platform.startswith("linux"):
        print("not measured: anonymous memory is read from Linux's /proc")
        return 1
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < _DISK_BYTES:
        print(f"not measured: {tempfile.gettempdir()} has {free / 1e9:.1f} GB free, {_DISK_BYTES / 1e9:.1f} GB are needed")
        return 1
    print(f"machine: {machine_line()}", flush=True)
    with comfyui(LARGE_CHECKPOINT) as server:
        if server is None:
            print("not measured: no ComfyUI was found (COMFYUI_PATH names a checkout)")
            return 0
        result = measure(server, options.workers)
    print(f"checkpoint:                        {result.checkpoint_mb:8.0f} MB, fp32")
    print(f"a worker's private memory, tiny:   {result.base_mb:8.0f} MB")
    print(f"a worker's private memory, large:  {result.loaded_mb:8.0f} MB")
    verdict = "within" if result.total_mb <= result.limit_mb else "ABOVE"
    print(
        f"{result.workers} workers together:                {result.total_mb:8.0f} MB, {verdict} the {result.limit_mb:.0f} MB of", end=" "
    )
    print(f"{result.workers} x base + 0.3 x checkpoint")
    print(f"ComfyUI without SP, tiny:          {result.host_base_mb:8.0f} MB")
    print(f"ComfyUI without SP, large:         {result.host_loaded_mb:8.0f} MB: {result.verdict()}")
    if options.json:
        print(json.dumps(asdict(result)))
    return 0


def measure(server: ComfyServer, workers: int) -> Result:
    """Sample one step of a tiny and then of the large checkpoint, without SP and then on ``workers`` CPU workers."""
    large = replace(ONE_STEP, files=dict.fromkeys(ONE_STEP.files, LARGE))
    host, worker = [], []
    for devices in (None, f"cpu:{workers}"):
        for tiny in (ONE_STEP, large):
            server.run(shrink(tiny.load(), tiny, devices, 0, "bench").prompt, timeout=900)
            if devices is None:
                host.append(anonymous_mb(server.process.pid))
            else:
                worker.append(mean(anonymous_mb(pid) for pid in worker_pids(server.process.pid)))
    size = os.stat(server.base / "models" / "diffusion_models" / LARGE).st_size / 1e6
    return Result(workers, size, *worker, *host)


def worker_pids(parent: int) -> list[int]:
    """Processes that ``parent`` started with the pool's bootstrap file."""
    # ComfyUI brings it
    import psutil

    found = []
    for child in psutil.Process(parent).children():
        # one that ended meanwhile is no worker of now
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(word.endswith("bootstrap.py") for word in child.cmdline()):
                found.append(child.pid)
    if not found:
        raise RuntimeError("no worker of ComfyUI was found")
    return sorted(found)


def anonymous_mb(pid: int) -> float:
    """Memory of a process that is no file's, in 10^6 bytes."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Anonymous"].split()[0]) * 1024 / 1e6
