"""torch.compile (inductor) on N CPU workers and in one process: what a step takes, and what the first step costs.

The model is a Wan inside whole prompts, compiled by ComfyUI's own node. One process has the threads of all workers. For the first step
every count of workers has a ComfyUI and a compile cache of its own, empty (cold) and then as the first left it (warm).
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ..demo.comfy_server import ComfyServer
from ..demo.machine_line import machine_line
from ..demo.tiny import shrink
from .all_against_one import environment_of_one
from .models import STEP_CHECKPOINTS, STEP_WORKFLOWS
from .prompts import Prompt, comfyui, seconds_of
from .turns import turns

SAMPLES = 5
#: a step's time in a prompt is the difference of prompts with these many steps
STEPS = (1, 4)
MODEL = STEP_WORKFLOWS[0]


@dataclass(frozen=True)
class Step:
    """Medians in seconds."""

    workers: int
    one_eager_s: float
    one_compiled_s: float
    workers_eager_s: float
    workers_compiled_s: float

    @property
    def gain(self) -> float:
        """Compiled against eager, on the workers."""
        return self.workers_compiled_s / self.workers_eager_s

    @property
    def eager_ratio(self) -> float:
        return self.workers_eager_s / self.one_eager_s

    @property
    def compiled_ratio(self) -> float:
        return self.workers_compiled_s / self.one_compiled_s


@dataclass(frozen=True)
class Start:
    """Seconds of a prompt with one step, the model being there already."""

    #: 0 for one process without workers
    workers: int
    eager_s: float
    cold_s: float
    warm_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench compile``; 0."""
    parser = argparse.ArgumentParser(prog="bench compile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="2,4", help="counts of CPU workers (default 2,4); a step is measured on the first")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"samples a median is taken of (default {SAMPLES})")
    parser.add_argument("--only", choices=("step", "start"), help="measure only this")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    counts = [int(count) for count in options.workers.split(",")]
    print(f"machine: {machine_line()}", flush=True)
    step = None if options.only == "start" else step_row(counts[0], options.samples)
    starts = [] if options.only == "step" else list(start_rows(counts))
    if step is None and not starts:
        print("not measured, no ComfyUI was found")
    if options.json:
        print(json.dumps({"step": step and asdict(step), "starts": [asdict(row) for row in starts]}))
    return 0


def step_row(workers: int, samples: int) -> Step | None:
    """A step eager and compiled, in one process and on workers, by turns. None without ComfyUI."""
    seeds, devices = itertools.count(), f"cpu:{workers}"
    with (
        tempfile.TemporaryDirectory(prefix="sp-bench-cache-") as cache,
        comfyui(STEP_CHECKPOINTS, environment=environment_of(cache, workers)) as server,
    ):
        if server is None:
            return None
        ways: dict[str, Callable[[], float]] = {
            f"{name}_{'compiled' if compiled else 'eager'}_s": partial(step_seconds, server, where, compiled, seeds)
            for name, where in (("one", None), ("workers", devices))
            for compiled in (False, True)
        }
        row = Step(workers=workers, **turns(ways, samples))
    print(f"a step, seconds: one process {row.one_eager_s:.3f} eager, {row.one_compiled_s:.3f} compiled; ", end="")
    print(f"{workers} workers {row.workers_eager_s:.3f} eager, {row.workers_compiled_s:.3f} compiled")
    print(f"compiled / eager on the workers {row.gain:.2f}; ", end="")
    print(f"workers / one process {row.eager_ratio:.2f} eager, {row.compiled_ratio:.2f} compiled", flush=True)
    return row


def step_seconds(server: ComfyServer, devices: str | None, compiled: bool, seeds: Iterator[int]) -> float:
    """Seconds of a step, by two prompts that differ by their number of steps."""
    few, many = STEPS
    took = [seconds_of(server, prompt_of(devices, compiled, count, next(seeds))) for count in STEPS]
    return (took[1] - took[0]) / (many - few)


def start_rows(counts: Sequence[int]) -> Iterator[Start]:
    """The first step in one process, and then on each count of workers; nothing without ComfyUI."""
    print(f"{'first step':<14}{'eager s':>10}{'cold s':>10}{'warm s':>10}{'cold ratio':>12}{'warm ratio':>12}", flush=True)
    one: Start | None = None
    for workers in (0, *counts):
        row = start_row(workers)
        if row is None:
            return
        one = one or row
        name = f"{workers} workers" if workers else "one process"
        ratios = f"{row.cold_s / one.cold_s:>12.2f}{row.warm_s / one.warm_s:>12.2f}"
        print(f"{name:<14}{row.eager_s:>10.2f}{row.cold_s:>10.2f}{row.warm_s:>10.2f}{ratios}", flush=True)
        yield row


def start_row(workers: int) -> Start | None:
    """The first compiled step of a ComfyUI, with an empty compile cache and then of another with a full one."""
    devices = f"cpu:{workers}" if workers else None
    took: list[float] = []
    eager = 0.0
    with tempfile.TemporaryDirectory(prefix="sp-bench-cache-") as cache:
        for _ in ("cold", "warm"):
            with comfyui(STEP_CHECKPOINTS, environment=environment_of(cache, max(workers, 1))) as server:
                if server is None:
                    return None
                seconds_of(server, prompt_of(devices, False, 1, 0))
                eager = seconds_of(server, prompt_of(devices, False, 1, 1))
                took.append(seconds_of(server, prompt_of(devices, True, 1, 2)))
    return Start(workers, eager, *took)


def environment_of(cache: str, workers: int) -> dict[str, str]:
    """Of a ComfyUI whose compile cache is this folder, and which has as many threads as the workers together."""
    return environment_of_one(workers) | {"TORCHINDUCTOR_CACHE_DIR": cache}


def prompt_of(devices: str | None, compiled: bool, steps: int, seed: int) -> Prompt:
    """A prompt of the model, with ComfyUI's compile node behind its loader if it is ``compiled``."""
    sized = replace(MODEL, inputs={**MODEL.inputs, "steps": steps})
    prompt: dict[str, Any] = shrink(MODEL.load(), sized, devices, seed, "bench").prompt
    if not compiled:
        return prompt
    [loader] = [name for name, node in prompt.items() if node["class_type"] == "UNETLoader"]
    for node in prompt.values():
        node["inputs"] = {key: ["compile", 0] if value == [loader, 0] else value for key, value in node["inputs"].items()}
    return {**prompt, "compile": {"class_type": "TorchCompileModel", "inputs": {"model": [loader, 0], "backend": "inductor"}}}
