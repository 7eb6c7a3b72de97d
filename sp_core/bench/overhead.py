"""What sequence parallelism adds around the computation: before the first step of a prompt, and to each step.

Before the first step: whole prompts with an unchanged graph and a new seed, one step of a tiny
model each, with SP and without, workers warm. Each step: a call with a 20 MB latent, less the time
that rank 0 spent in the model, exchange included: what is left is packing, copying and waking.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from ..demo.comfy_server import ComfyServer
from ..demo.machine_line import machine_line
from ..demo.tiny import shrink
from ..pool.devices import parse_devices
from ..reference import ReferenceConfig
from ..reference.sample import Inputs, forward, open_pool, step_arguments
from .models import ONE_STEP
from .prompts import comfyui, seconds_of
from .turns import turns

SAMPLES = 15
_WARM_UP = 3
#: 8 x 5 x 5 tokens of 16 x 4 x 20 x 20 values, 64 channels in the model: almost only data
_DATA_CONFIG = ReferenceConfig(layers=1, heads=2, head_dim=32, patch=(4, 20, 20))
_DATA_LATENT = {"frames": 32, "rows": 100, "columns": 100}


@dataclass(frozen=True)
class Row:
    """Medians in milliseconds."""

    what: str
    #: what ``with_ms`` is compared with
    without_ms: float
    with_ms: float
    extra_ms: float
    #: more than this is too much
    bar_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench overhead``; 0."""
    parser = argparse.ArgumentParser(prog="bench overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="CPU workers (default 2)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"samples a median is taken of (default {SAMPLES})")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    print(f"machine: {machine_line()}", flush=True)
    rows = [per_step(options.workers, options.samples)]
    with comfyui({}) as server:
        if server is None:
            print("before the first step: not measured, no ComfyUI was found")
        else:
            rows.append(first_step(server, options.workers, options.samples))
    print(f"{'':<62}{'ms':>9}{'with SP ms':>11}{'extra ms':>10}{'bar':>6}")
    for row in rows:
        remark = "" if row.extra_ms <= row.bar_ms else "   ABOVE"
        print(f"{row.what:<62}{row.without_ms:>9.1f}{row.with_ms:>11.1f}{row.extra_ms:>10.1f}{row.bar_ms:>6.0f}{remark}")
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    return 0


def per_step(workers: int, samples: int = SAMPLES) -> Row:
    """The whole call against the time that rank 0 spent in the model: what is left is packing, copying, waking and waiting."""
    inputs = Inputs.seeded(_DATA_CONFIG, 0, **_DATA_LATENT)
    arguments = step_arguments(inputs, inputs.video, inputs.audio, 0.5)
    in_model_ms, call_ms = [], []
    with open_pool(_DATA_CONFIG, 0, parse_devices(f"cpu:{workers}", "cpu", 0)) as pool:
        for number in range(_WARM_UP + samples):
            started = time.perf_counter()
            reply = forward(pool, arguments)
            if number >= _WARM_UP:
                call_ms.append((time.perf_counter() - started) * 1e3)
                in_model_ms.append(reply["seconds"] * 1e3)
    extra = median(call - in_model for call, in_model in zip(call_ms, in_model_ms, strict=True))
    megabytes = inputs.video.numel() * inputs.video.element_size() / 1e6
    return Row(f"a step on a {megabytes:.1f} MB latent: in rank 0's model, whole call", median(in_model_ms), median(call_ms), extra, 25)


def first_step(server: ComfyServer, workers: int, samples: int = SAMPLES) -> Row:
    """Whole prompts of one step, without SP and with it, workers warm."""
    prompt = ONE_STEP.load()
    seeds = itertools.count()

    def prompts(devices: str | None) -> Callable[[], float]:
        return lambda: 1e3 * seconds_of(server, shrink(prompt, ONE_STEP, devices, next(seeds), "bench").prompt)

    medians = turns({"without": prompts(None), "with": prompts(f"cpu:{workers}")}, samples, warm_up=2)
    extra = medians["with"] - medians["without"]
    return Row("a prompt, unchanged graph, one step: without SP, with SP", medians["without"], medians["with"], extra, 50)
