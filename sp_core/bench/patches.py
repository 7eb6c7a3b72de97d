"""What it costs to probe code of other packs: the first step and the later ones of a Wan model with a harmless unknown patch.

The patch is probed by the workers of one ComfyUI and trusted unseen (``SP_TRUST_PATCHES``) by those of another. Each also computes the
model without the patch, by which its times are divided: two processes are never equally fast.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from ..demo.comfy_server import ComfyServer
from ..demo.machine_line import machine_line
from ..demo.tiny import shrink
from ..settings import TRUST_PATCHES
from .models import STEP_CHECKPOINTS, STEP_WORKFLOWS
from .prompts import comfyui
from .turns import taken_in_turns

SAMPLES = 5
#: of each prompt; one forward each
STEPS = 6
PATCHES = "SPDemoPatches"


@dataclass(frozen=True)
class Row:
    """Medians in seconds, of forwards as ComfyUI's process waits for them."""

    way: str
    first_s: float
    later_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench patches``; 0."""
    parser = argparse.ArgumentParser(prog="bench patches", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="CPU workers (default 2)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"samples a median is taken of (default {SAMPLES})")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    print(f"machine: {machine_line()}", flush=True)
    with comfyui(STEP_CHECKPOINTS) as server, comfyui(STEP_CHECKPOINTS, environment={TRUST_PATCHES: "1"}) as trusting:
        if server is None or trusting is None:
            print("not measured, no ComfyUI was found")
            return 0
        rows, ratio = measured(server, trusting, options.workers, options.samples)
    print(f"{'way':<24}{'first step s':>14}{'later step s':>14}")
    for row in rows:
        print(f"{row.way:<24}{row.first_s:>14.3f}{row.later_s:>14.3f}")
    print(f"later steps, probed against trusted: {ratio:.3f} (each against its own without the patch; median of neighbouring samples)")
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "ratio": ratio}))
    return 0


def measured(server: ComfyServer, trusting: ComfyServer, workers: int, samples: int) -> tuple[list[Row], float]:
    """The rows, and the ratio of later steps, probed to trusted."""
    measure = partial(forwards, devices=f"cpu:{workers}", seeds=itertools.count())
    ways: dict[str, Callable[[], list[float]]] = {
        "without, beside probed": partial(measure, server),
        "probed": partial(measure, server, change=with_patches),
        "without, beside trusted": partial(measure, trusting),
        "trusted": partial(measure, trusting, change=with_patches),
    }
    taken = taken_in_turns(ways, samples)
    rows = [Row(way, median(first for first, *_ in found), median(map(later, found))) for way, found in taken.items()]
    ratios = [
        later(probed) / later(beside_probed) / (later(trusted) / later(beside_trusted))
        for beside_probed, probed, beside_trusted, trusted in zip(*taken.values(), strict=True)
    ]
    return rows, median(ratios)


def later(seconds: Sequence[float]) -> float:
    """Of a sampling run's forwards, the median of those behind the first."""
    return median(seconds[1:])


def forwards(
    server: ComfyServer, devices: str, seeds: Iterator[int], change: Callable[[dict[str, Any]], dict[str, Any]] = lambda prompt: prompt
) -> list[float]:
    """Seconds of each forward of a prompt, as the server tells them."""
    tiny = STEP_WORKFLOWS[0]
    sized = replace(tiny, inputs={**tiny.inputs, "steps": STEPS})
    before = last_forwards(server)
    server.wait(server.queue(change(shrink(tiny.load(), sized, devices, next(seeds), "bench").prompt)), timeout=900)
    [seconds] = [seconds for key, seconds in last_forwards(server).items() if seconds and seconds != before.get(key)]
    return seconds


def last_forwards(server: ComfyServer) -> dict[str, list[float]]:
    """Of each shared-out model, seconds of the newest run's forwards."""
    return {model["key"]: model["last_forwards_s"] for model in server.get("/sp/status")["models"]}


def with_patches(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt with the demo's patches behind each loader."""
    loaders = {name for name, node in prompt.items() if node["class_type"] == "UNETLoader"}
    changed: dict[str, Any] = {}
    for name, node in prompt.items():
        wires = {key: [f"{x[0]}-patched", 0] if isinstance(x, list) and x[0] in loaders else x for key, x in node["inputs"].items()}
        changed[name] = {**node, "inputs": wires}
    return changed | {f"{name}-patched": {"class_type": PATCHES, "inputs": {"model": [name, 0]}} for name in loaders}
