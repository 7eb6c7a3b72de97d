"""A VAE's decode on N CPU workers against one process that has all their threads.

Nothing is gained on a CPU: the ratio shows what sharing the frame out costs, halos, whole frames, control plane and all.
Whole prompts of ComfyUI that decode a new latent each, with its own Wan and LTX classes at a fraction of their width.
With ``--memory`` it measures memory instead of time.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..demo.comfy_server import ComfyServer
from ..demo.machine_line import machine_line
from .all_against_one import AllAgainstOne, threads_of_all
from .decode_memory import GIVES_BACK, MemoryRow, rises
from .memory import worker_pids
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
    parser.add_argument("--memory", action="store_true", help="measure how far memory rises, instead of seconds (Linux)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    print(f"machine: {machine_line()}", flush=True)
    rows: list[Row | MemoryRow] = []
    with comfyui({}, environment=GIVES_BACK if options.memory else None) as server:
        if server is None:
            print("not measured, no ComfyUI was found")
            return 1
        measure = _print_memory if options.memory else _print_seconds
        rows += measure(server, options.workers, options.samples)
    if options.json:
        print(json.dumps({"rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}))
    return 0


def _print_seconds(server: ComfyServer, workers: int, samples: int) -> Iterator[Row]:
    print(f"{'video':<36}{'workers':>8}{'threads':>9}{'one process s':>15}{'workers s':>11}{'ratio':>7}", flush=True)
    for kind in _VIDEOS:
        row = decode_row(server, kind, workers, samples)
        times = f"{row.one_process_s:>15.3f}{row.workers_s:>11.3f}{row.ratio:>7.2f}"
        print(f"{row.video:<36}{row.workers:>8}{row.threads:>9}{times}", flush=True)
        yield row


def _print_memory(server: ComfyServer, workers: int, samples: int) -> Iterator[MemoryRow]:
    print(f"{'video':<36}{'workers':>8}{'one process MB':>16}{'a worker MB':>13}{'ratio to its share':>20}", flush=True)
    for kind in _VIDEOS:
        row = memory_row(server, kind, workers, samples)
        print(f"{row.video:<36}{row.workers:>8}{row.one_process_mb:>16.1f}{row.worker_mb:>13.1f}{row.ratio:>20.2f}", flush=True)
        yield row


def decode_row(server: ComfyServer, kind: str, workers: int, samples: int = SAMPLES) -> Row:
    """Prompts that decode, in ComfyUI's process and in the workers, which take turns."""
    title, sizes = _VIDEOS[kind]
    seeds = itertools.count()

    def seconds(devices: str | None) -> Callable[[], float]:
        return lambda: seconds_of(server, _prompt(kind, sizes, devices, next(seeds)))

    medians = turns({"one": seconds(None), "all": seconds(f"cpu:{workers}")}, samples)
    times = {"one_process_s": medians["one"], "workers_s": medians["all"]}
    return Row(video=title, workers=workers, threads=threads_of_all(workers), **times)


def memory_row(server: ComfyServer, kind: str, workers: int, samples: int = SAMPLES) -> MemoryRow:
    """Prompts that decode, in ComfyUI's process and in the workers, and how far the memory of each rises."""
    title, sizes = _VIDEOS[kind]
    seeds, pids = itertools.count(), {"one": [server.process.pid], "all": list[int]()}

    def decode(way: str, devices: str | None) -> Callable[[], None]:
        def run() -> None:
            seconds_of(server, _prompt(kind, sizes, devices, next(seeds)))
            if way == "all":
                pids[way] = worker_pids(server.process.pid)

        return run

    rise = rises(pids, {"one": decode("one", None), "all": decode("all", f"cpu:{workers}")}, samples)
    return MemoryRow(video=title, workers=workers, one_process_mb=rise["one"], worker_mb=rise["all"])


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
