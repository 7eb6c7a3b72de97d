"""What it costs to probe code of other packs: the first step and the later ones of a Wan model with a harmless unknown patch.

Three ways take turns: without the patch, with the patch probed, and with the patch trusted unseen (``SP_TRUST_PATCHES``), which is
what the probe is measured against.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from ..demo.comfy_server import ComfyServer
from ..demo.machine_line import machine_line
from ..settings import TRUST_PATCHES
from .models import STEP_CHECKPOINTS, STEP_WORKFLOWS
from .prompts import StepSeconds, comfyui, step_seconds
from .turns import taken_in_turns

SAMPLES = 7
#: steps of the two prompts whose difference is the time of later steps
STEPS = (1, 6)
PATCHES = "SPDemoPatches"


@dataclass(frozen=True)
class Row:
    """Medians in seconds. The first step's is of a whole prompt of one step."""

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
    print(f"{'way':<12}{'one step s':>12}{'later step s':>14}")
    for row in rows:
        print(f"{row.way:<12}{row.first_s:>12.3f}{row.later_s:>14.3f}")
    print(f"later steps, probed against trusted: {ratio:.3f} (median of the ratios of neighbouring samples)")
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "ratio": ratio}))
    return 0


def measured(server: ComfyServer, trusting: ComfyServer, workers: int, samples: int) -> tuple[list[Row], float]:
    """The rows, and the ratio of later steps, probed to trusted."""
    measure = partial(step_seconds, tiny=STEP_WORKFLOWS[0], devices=f"cpu:{workers}", seeds=itertools.count(), steps=STEPS)
    ways: dict[str, Callable[[], StepSeconds]] = {
        "unpatched": partial(measure, server),
        "probed": partial(measure, server, change=with_patches),
        "trusted": partial(measure, trusting, change=with_patches),
    }
    taken = taken_in_turns(ways, samples)
    rows = [Row(way, median(took.first_s for took in found), median(took.later_s for took in found)) for way, found in taken.items()]
    ratios = [probed.later_s / trusted.later_s for probed, trusted in zip(taken["probed"], taken["trusted"], strict=True)]
    return rows, median(ratios)


def with_patches(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt with the demo's patches behind each loader."""
    loaders = {name for name, node in prompt.items() if node["class_type"] == "UNETLoader"}
    changed: dict[str, Any] = {}
    for name, node in prompt.items():
        wires = {key: [f"{x[0]}-patched", 0] if isinstance(x, list) and x[0] in loaders else x for key, x in node["inputs"].items()}
        changed[name] = {**node, "inputs": wires}
    return changed | {f"{name}-patched": {"class_type": PATCHES, "inputs": {"model": [name, 0]}} for name in loaders}
