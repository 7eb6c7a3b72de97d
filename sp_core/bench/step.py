"""One denoising step on N CPU workers against one process that has all their threads.

Nothing is gained on a CPU: the ratio shows what sequence parallelism itself costs, exchange,
control plane and all. Measured on the reference model and, where a ComfyUI is found, on its
own Wan and LTX-2 classes inside whole prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..demo.comfy_server import ComfyServer
from ..demo.machine_line import machine_line
from ..demo.tiny import Tiny
from ..pool.devices import parse_devices
from ..reference import ReferenceConfig
from ..reference.sample import Inputs, local, pooled, step_arguments
from .all_against_one import AllAgainstOne, environment_of_one, threads_of_all
from .models import STEP_CHECKPOINTS, STEP_WORKFLOWS
from .prompts import comfyui, step_seconds
from .turns import turns

SAMPLES = 5
#: a step's time in a prompt is the difference of prompts with these many steps
STEPS = (1, 4)


@dataclass(frozen=True, kw_only=True)
class Row(AllAgainstOne):
    model: str
    tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench step``; 0."""
    parser = argparse.ArgumentParser(prog="bench step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="CPU workers (default 2)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"samples a median is taken of (default {SAMPLES})")
    parser.add_argument("--reference-only", action="store_true", help="leave ComfyUI out even if one is found")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    print(f"machine: {machine_line()}", flush=True)
    print(f"{'model':<24}{'tokens':>7}{'workers':>9}{'threads':>9}{'one process s':>15}{'workers s':>11}{'ratio':>7}", flush=True)
    rows = []
    for row in _rows(options.workers, options.samples, options.reference_only):
        rows.append(row)
        print(
            f"{row.model:<24}{row.tokens:>7}{row.workers:>9}{row.threads:>9}"
            f"{row.one_process_s:>15.3f}{row.workers_s:>11.3f}{row.ratio:>7.2f}",
            flush=True,
        )
    print("one process has as many threads as all workers together; each worker has an equal share of the cores")
    if options.json:
        print(json.dumps({"rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}))
    return 0


def _rows(workers: int, samples: int, reference_only: bool) -> Any:
    yield reference_row(workers, samples)
    if reference_only:
        return
    with comfyui(STEP_CHECKPOINTS, environment=environment_of_one(workers)) as server:
        if server is not None:
            yield from (host_row(server, tiny, workers, samples) for tiny in STEP_WORKFLOWS)


def reference_row(workers: int, samples: int = SAMPLES) -> Row:
    """A forward of the reference model, in a pool and in this process."""
    config = ReferenceConfig(layers=2, heads=10, head_dim=64)
    inputs = Inputs.seeded(config, 0, frames=9, rows=30, columns=34)
    arguments = step_arguments(inputs, inputs.video, inputs.audio, 0.5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads_of_all(workers))
    try:
        with pooled(config, 0, parse_devices(f"cpu:{workers}", "cpu", 0)) as shared:
            alone = local(config, 0)
            medians = turns({"one": _timed(lambda: alone(arguments)), "all": _timed(lambda: shared(arguments))}, samples)
    finally:
        torch.set_num_threads(before)
    return _row("reference model", inputs.tokens, workers, medians)


def _timed(call: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return measure


def host_row(server: ComfyServer, tiny: Tiny, workers: int, samples: int = SAMPLES) -> Row:
    """A step inside a prompt: the host's sampler, guider and all."""
    seeds = itertools.count()

    def seconds(devices: str | None) -> Callable[[], float]:
        return lambda: step_seconds(server, tiny, devices, seeds, STEPS)

    medians = turns({"one": seconds(None), "all": seconds(f"cpu:{workers}")}, samples)
    return _row(tiny.title, tiny.tokens, workers, medians)


def _row(model: str, tokens: int, workers: int, medians: Mapping[str, float]) -> Row:
    times = {"one_process_s": medians["one"], "workers_s": medians["all"]}
    return Row(model=model, tokens=tokens, workers=workers, threads=threads_of_all(workers), **times)
