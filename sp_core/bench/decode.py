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
from .all_against_one import AllAgainstOne, environment_of_one, threads_of_all
from .decode_memory import GIVES_BACK, MemoryRow, rises
from .memory import worker_pids
from .prompts import comfyui, seconds_of
from .turns import turns

SAMPLES = 5
#: the nodes whose VAE decodes in ComfyUI's process and in the workers
ONE, ALL = "vae", "shared"
Prompt = dict[str, dict[str, Any]]
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
    environment = environment_of_one(options.workers) | (GIVES_BACK if options.memory else {})
    with comfyui({}, environment=environment) as server:
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

    def seconds(source: str) -> Callable[[], float]:
        return lambda: seconds_of(server, _prompt(kind, sizes, f"cpu:{workers}", source, next(seeds)))

    medians = turns({source: seconds(source) for source in (ONE, ALL)}, samples)
    times = {"one_process_s": medians[ONE], "workers_s": medians[ALL]}
    return Row(video=title, workers=workers, threads=threads_of_all(workers), **times)


def memory_row(server: ComfyServer, kind: str, workers: int, samples: int = SAMPLES) -> MemoryRow:
    """Prompts that decode, in ComfyUI's process and in the workers, and how far the memory of each rises."""
    title, sizes = _VIDEOS[kind]
    seeds, devices = itertools.count(), f"cpu:{workers}"
    pids = {ONE: lambda: [server.process.pid], ALL: lambda: worker_pids(server.process.pid)}

    def decode(source: str) -> Callable[[], float]:
        return lambda: seconds_of(server, _prompt(kind, sizes, devices, source, next(seeds)))

    rise = rises(pids, {source: decode(source) for source in pids}, lambda: seconds_of(server, _rest(kind, devices, next(seeds))), samples)
    return MemoryRow(video=title, workers=workers, one_process_mb=rise[ONE], worker_mb=rise[ALL])


def _prompt(kind: str, sizes: tuple[int, ...], devices: str, source: str, seed: int) -> Prompt:
    """Decodes a new latent with the VAE of the node ``source``.

    The nodes of the other way are in it as well: ComfyUI would let go of their VAE, and the workers would load it anew.
    """
    latent = dict(zip(("channels", "frames", "height", "width"), sizes, strict=True))
    return {
        **_vaes(kind, devices),
        "latent": {"class_type": "SPDemoLatent", "inputs": {**latent, "seed": seed}},
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["latent", 0], "vae": [source, 0]}},
        "take": {"class_type": "SPDemoTake", "inputs": {"image": ["decode", 0]}},
    }


def _rest(kind: str, devices: str, seed: int) -> Prompt:
    """Keeps the VAEs, and has ComfyUI let go of the video that it decoded before."""
    small = {"width": 16, "height": 16, "batch_size": 1, "color": seed}
    return {
        **_vaes(kind, devices),
        "small": {"class_type": "EmptyImage", "inputs": small},
        "take": {"class_type": "SPDemoTake", "inputs": {"image": ["small", 0]}},
    }


def _vaes(kind: str, devices: str) -> Prompt:
    return {
        ONE: {"class_type": "SPDemoVAE", "inputs": {"kind": kind}},
        ALL: {"class_type": "SPVAEPatch", "inputs": {"vae": [ONE, 0], "devices": devices}},
    }
