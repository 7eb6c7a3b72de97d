"""Prompts on a ComfyUI of the benchmark's own, and the seconds that they and their steps take."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..demo.checkpoints import Checkpoint
from ..demo.comfy_server import DEMO_NODES, ComfyServer, prepare_base, prompt_seconds
from ..demo.tiny import Tiny, shrink
from ..host_path import find_comfyui

Prompt = dict[str, Any]


@contextlib.contextmanager
def comfyui(
    checkpoints: Mapping[str, Checkpoint], devices_are_cpu: bool = True, environment: dict[str, str] | None = None
) -> Iterator[ComfyServer | None]:
    """A headless ComfyUI with the demo's nodes and checkpoints, and with ``checkpoints``; None when there is no checkout."""
    host = find_comfyui()
    if host is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="sp-bench-") as folder:
        base = Path(folder)
        prepare_base(host, base, [DEMO_NODES], checkpoints)
        with ComfyServer(host, base, "--cpu" if devices_are_cpu else "--force-fp32", environment=environment) as server:
            yield server


def seconds_of(server: ComfyServer, prompt: Prompt) -> float:
    """Seconds that a prompt takes from ComfyUI's start of it to its end."""
    return prompt_seconds(server.wait(server.queue(prompt), timeout=900))


def step_seconds(
    server: ComfyServer,
    tiny: Tiny,
    devices: str | None,
    seeds: Iterator[int],
    steps: tuple[int, int],
) -> float:
    """Seconds of a step: two prompts are queued that differ by their number of steps, ``steps``, so that the difference is steps alone.

    Args:
        devices: of SP Model Patch; None for a prompt without it.
        seeds: a new one for each prompt, so that ComfyUI computes it.
    """
    prompt, took = tiny.load(), []
    for count in steps:
        sized = replace(tiny, inputs={**tiny.inputs, "steps": count})
        took.append(seconds_of(server, shrink(prompt, sized, devices, next(seeds), "bench").prompt))
    few, many = steps
    return (took[1] - took[0]) / (many - few)
