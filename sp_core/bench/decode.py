"""A VAE's decode on N CPU workers against one process that has all their threads.

Nothing is gained on a CPU: the ratio shows what sharing the frame out costs, halos, whole frames, control plane and all.
Whole prompts of ComfyUI that decode a new latent each, with its own Wan and LTX classes at a fraction of their width.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..demo.comfy_server import ComfyServer
from ..demo.machine_line import machine_line
from .all_against_one import AllAgainstOne, threads_of_all
from .prompts import comfyui, seconds_of
from .turns import turns

SAMPLES = 5
#: kind -> (title, latent: channels, frames, height, width)
_VIDEOS = {
    "wan": ("Wan 2.1, 5 frames of 128 x 192", (16, 2, 24, 16)),
    "ltx": ("LTX-Video, 17 frames of 384 x 512", (128, 3, 16, 12)),
}


@dataclass(frozen=True, kw_only=True)
class Row(AllAgainstOne):
    video: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench decode``; 0, or 1 where there is no ComfyUI."""
    parser = argparse.ArgumentParser(prog="bench decode", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="CPU workers (default 2)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"samples a median is taken of (default {SAMPLES})")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    print(f"machine: {machine_line()}", flush=True)
    rows = []
    with comfyui({}) as server:
        if server is None:
            print("not measured, no ComfyUI was found")
            return 1
        print(f"{'video':<36}{'workers':>8}{'threads':>9}{'one process s':>15}{'workers s':>11}{'ratio':>7}", flush=True)
        for kind in _VIDEOS:
            rows.append(row := decode_row(server, kind, options.workers, options.samples))
            times = f"{row.one_process_s:>15.3f}{row.workers_s:>11.3f}{row.ratio:>7.2f}"
            print(f"{row.video:<36}{row.workers:>8}{row.threads:>9}{times}", flush=True)
    if options.json:
        print(json.dumps({"rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}))
    return 0


def decode_row(server: ComfyServer, kind: str, workers: int, samples: int = SAMPLES) -> Row:
    """Prompts that decode, in ComfyUI's process and in the workers, which take turns."""
    title, sizes = _VIDEOS[kind]
    seeds = itertools.count()

    def seconds(devices: str | None) -> Callable[[], float]:
        return lambda: seconds_of(server, _prompt(kind, sizes, devices, next(seeds)))

    medians = turns({"one": seconds(None), "all": seconds(f"cpu:{workers}")}, samples)
    times = {"one_process_s": medians["one"], "workers_s": medians["all"]}
    return Row(video=title, workers=workers, threads=threads_of_all(workers), **times)


def _prompt(kind: str, sizes: tuple[int, ...], devices: str | None, seed: int) -> dict[str, dict[str, Any]]:
    latent = dict(zip(("channels", "frames", "height", "width"), sizes, strict=True))
    prompt: dict[str, dict[str, Any]] = {
        "vae": {"class_type": "SPDemoVAE", "inputs": {"kind": kind}},
        "latent": {"class_type": "SPDemoLatent", "inputs": {**latent, "seed": seed}},
        "take": {"class_type": "SPDemoTake", "inputs": {"image": ["decode", 0]}},
    }
    source = "vae"
    if devices is not None:
        source = "shared"
        prompt[source] = {"class_type": "SPVAEPatch", "inputs": {"vae": ["vae", 0], "devices": devices}}
    prompt["decode"] = {"class_type": "VAEDecode", "inputs": {"samples": ["latent", 0], "vae": [source, 0]}}
    return prompt
