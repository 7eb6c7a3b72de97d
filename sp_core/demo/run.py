"""The demo: the same sampling with and without sequence parallelism, side by side.

With a ComfyUI checkout it runs workflows that ship with this extension on that host; without
one it runs the reference model through the same pool.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..host_path import find_comfyui
from ..pool.devices import accelerators, parse_devices
from .comfy_server import DEMO_NODES, ComfyServer, prepare_base, prompt_seconds
from .machine_line import machine_line
from .tiny import TINY_WORKFLOWS, Tiny, shrink

#: fp32 on CPU: two runs differ only in the order of sums
CPU_TOLERANCE = 2e-5
#: accelerators choose kernels by shape
ACCELERATOR_TOLERANCE = 2e-4
#: the first is cold, the others are timed
_RUNS = 3
_HOST_PACKAGES = ("aiohttp", "sqlalchemy", "torchsde", "transformers", "yaml")


@dataclass(frozen=True)
class Row:
    """One model: relative L2 error of its latents with SP, and median seconds for each step without and with SP."""

    title: str
    tokens: int
    devices: str
    error: float
    stock_s: float
    sp_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo. Returns 0 if every result agreed with the run without SP."""
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", help="auto, 0,1,... or cpu:N (default: all accelerators if there are two, else cpu:2)")
    parser.add_argument("--reference", action="store_true", help="run the reference model even if a ComfyUI is found")
    options = parser.parse_args(argv)
    kind, count = accelerators()
    devices = options.devices or ("auto" if count > 1 else "cpu:2")
    on_cpu = devices.startswith("cpu")
    tolerance = CPU_TOLERANCE if on_cpu else ACCELERATOR_TOLERANCE
    try:
        chosen = parse_devices(devices, kind, count)
    except ValueError as error:
        parser.error(str(error))
    if len(chosen) < 2:
        parser.error(f"'{devices}' is one device, which leaves nothing to compare")

    host = None if options.reference else find_comfyui()
    missing = [name for name in _HOST_PACKAGES if importlib.util.find_spec(name) is None]
    if host is not None and missing:
        print(f"A ComfyUI was found in {host}, but this Python lacks its requirements ({', '.join(missing)}).")
        host = None
    if host is not None:
        print(f"Using the ComfyUI in {host}, started headless. Devices: {devices}.")
        rows = run_on_host(host, devices, on_cpu)
    else:
        why = "as asked" if options.reference else "no ComfyUI that can run was found (COMFYUI_PATH names a checkout)"
        print(f"Running the reference model, {why}. Devices: {devices}.")
        rows = [run_reference(devices)]
    print("\n".join(table(rows, tolerance)))
    return 0 if all(row.error <= tolerance for row in rows) else 1


def run_on_host(host: Path, devices: str, on_cpu: bool) -> list[Row]:
    """Every tiny workflow on a host of its own."""
    with tempfile.TemporaryDirectory(prefix="sp-demo-") as folder:
        base = Path(folder)
        print("Making tiny checkpoints with ComfyUI's own model classes ...", flush=True)
        prepare_base(host, base, [DEMO_NODES])
        # fp32 makes the comparison sharp: half precision would hide what differs behind its rounding
        # threads that wait do not spin: on a busy machine the run without SP, which has more threads, would suffer from that
        with ComfyServer(host, base, "--cpu" if on_cpu else "--force-fp32", environment={"OMP_WAIT_POLICY": "passive"}) as server:
            return [_compare(server, tiny, devices) for tiny in TINY_WORKFLOWS]


def _compare(server: ComfyServer, tiny: Tiny, devices: str) -> Row:
    """Stock and SP in turns: one cold run each, then warm ones with new seeds, which are timed."""
    prompt = tiny.load()
    errors, seconds = [], {"stock": [], "sp": []}  # type: ignore[var-annotated]
    for seed in range(_RUNS):
        latents = {}
        for branch, where in (("stock", None), ("sp", devices)):
            shrunk = shrink(prompt, tiny, where, seed, f"{tiny.workflow}-{branch}-{seed}")
            if branch == "sp" and seed == 0:
                print(f"\nworkflows/api/{tiny.workflow}.json, with these substitutions:", *shrunk.changes, sep="\n  ", flush=True)
            entry = server.wait(server.queue(shrunk.prompt))
            latents[branch] = _saved(server, entry, shrunk.saves)
            if seed:
                seconds[branch].append(prompt_seconds(entry) / tiny.steps)
        errors += [relative_l2(mine, theirs) for mine, theirs in zip(latents["sp"], latents["stock"], strict=True)]
    return Row(tiny.title, tiny.tokens, devices, worst(errors), median(seconds["stock"]), median(seconds["sp"]))


def _saved(server: ComfyServer, entry: dict[str, Any], nodes: list[str]) -> list[Tensor]:
    from safetensors.torch import load_file

    files = [file for node in nodes for file in entry["outputs"][node]["latents"]]
    return [load_file(server.base / "output" / file["subfolder"] / file["filename"])["latent_tensor"] for file in files]


def run_reference(devices: str) -> Row:
    """The reference model in one process and in a pool."""
    from ..reference import ReferenceConfig
    from ..reference.sample import Inputs, local, pooled, sample

    kind, count = accelerators()
    chosen = parse_devices(devices, kind, count)
    config = ReferenceConfig(heads=7, layers=4)
    inputs = Inputs.seeded(config, 1, frames=9, rows=14, columns=26)
    steps = 6
    with pooled(config, 0, chosen) as predict:
        together = sample(predict, inputs, steps)
    alone = sample(local(config, 0, chosen[0].kind), inputs, steps)
    errors = [relative_l2(together.video, alone.video), relative_l2(together.audio, alone.audio)]
    return Row("Reference model (video and audio)", inputs.tokens, devices, worst(errors), median(alone.seconds), median(together.seconds))


def relative_l2(mine: Tensor, theirs: Tensor) -> float:
    """|mine - theirs| / |theirs|; infinite where shapes differ, values are not finite, or there is nothing to compare with."""
    if mine.shape != theirs.shape or not torch.isfinite(theirs).all() or not theirs.any():
        return math.inf
    error = float((mine.double() - theirs.double()).norm() / theirs.double().norm())
    return error if math.isfinite(error) else math.inf


def worst(errors: list[float]) -> float:
    """The largest; infinite where nothing was compared."""
    return max(errors, default=math.inf)


def table(rows: Sequence[Row], tolerance: float) -> list[str]:
    """The lines that the demo ends with."""
    lines = ["", f"{'model':<36}{'tokens':>7}{'devices':>9}{'relative L2':>13}{'s/step alone':>14}{'s/step SP':>11}{'ratio':>7}"]
    for row in rows:
        remark = "" if row.error <= tolerance else f"   DIFFERS (at most {tolerance:g} is allowed)"
        lines.append(
            f"{row.title:<36}{row.tokens:>7}{row.devices:>9}{row.error:>13.1e}"
            f"{row.stock_s:>14.3f}{row.sp_s:>11.3f}{row.stock_s / row.sp_s:>7.2f}{remark}"
        )
    lines += ["", "relative L2: difference of the sampled latents, with SP against without. ratio: above 1 SP was faster."]
    if any(row.devices.startswith("cpu") for row in rows):
        lines.append("CPU workers share the cores that one process has to itself: they show that the result is right, not a speed-up.")
    lines.append(f"machine: {machine_line()}")
    return lines
