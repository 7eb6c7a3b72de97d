"""The ``devices`` string of the nodes: which workers a pool has."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_WORKERS = 16


@dataclass(frozen=True)
class WorkerDevice:
    """One worker's device: ``kind`` is a torch device type, ``index`` counts the devices that this process sees."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    def is_on(self, device: torch.device) -> bool:
        """The worker computes on this device of ComfyUI's process; all CPU workers share the CPU, which has no index."""
        if self.kind == device.type == "cpu" and device.index is None:
            return True
        return self.kind == device.type and self.index == (device.index or 0)


def shared_devices(one: Collection[WorkerDevice], other: Collection[WorkerDevice]) -> list[WorkerDevice]:
    """Devices that two lists both need for themselves. Workers on the CPU share it, as all processes do."""
    return [device for device in one if device in other and device.kind != "cpu"]


def accelerators() -> tuple[str, int]:
    """(torch device type, how many this process sees); ("cpu", 0) where there is none."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type not in ("cuda", "xpu"):
        return "cpu", 0
    return accelerator.type, torch.accelerator.device_count()


#: (operating system, kind of device) -> why its workers cannot work together; what is not listed works
_REFUSED = {
    ("Windows", "cuda"): "torch for Windows has no NCCL, which the GPUs would talk through",
    ("Windows", "rocm"): "torch for Windows has no RCCL, which the GPUs would talk through",
    ("Windows", "xpu"): "torch for Windows has no oneCCL, which the GPUs would talk through",
    ("Windows", "cpu"): "worker processes share memory and signals in a way that Windows does not have",
    ("Darwin", "mps"): "a Mac has one GPU, so there is nothing to share",
}
_INSTEAD = {
    "Windows": "Run ComfyUI under WSL2, or remove SP Model Patch",
    "Darwin": "Remove SP Model Patch; cpu:2 works, for trying things out",
}


def platform_problem(system: str, kind: str) -> str | None:
    """Why several devices of this kind cannot be used together on this system; None where they can.

    Args:
        system: as ``platform.system()`` says.
        kind: cpu, cuda (NVIDIA), rocm, xpu or mps.
    """
    reason = _REFUSED.get((system, kind))
    return None if reason is None else f"Several devices ({kind}) cannot work together on {system}: {reason}. {_INSTEAD[system]}"


def maker(kind: str) -> str:
    """The kind of a torch device type: torch calls AMD's GPUs cuda too."""
    import torch

    return "rocm" if kind == "cuda" and torch.version.hip else kind


def parse_devices(text: str, kind: str, visible: int) -> tuple[WorkerDevice, ...]:
    """Read ``auto``, ``0,1,3`` or ``cpu:4``.

    Args:
        text: what the user wrote.
        kind: torch device type of the machine's accelerators.
        visible: how many of them this process sees.

    Raises:
        ValueError: with what exists, for a person.
    """
    exists = _what_exists(kind, visible)
    wanted = text.strip().lower()
    if wanted == "auto":
        return tuple(WorkerDevice(kind, index) for index in range(min(visible, MAX_WORKERS)))
    if match := re.fullmatch(r"cpu:(\d+)", wanted):
        count = int(match[1])
        if not 1 <= count <= MAX_WORKERS:
            raise ValueError(f"'{text}' asks for {count} CPU workers; 1 to {MAX_WORKERS} are possible. {exists}")
        return tuple(WorkerDevice("cpu", index) for index in range(count))
    if not re.fullmatch(r"\d+(\s*,\s*\d+)*", wanted):
        raise ValueError(f"'{text}' is no device list: write auto, indices such as 0,1,3, or cpu:4. {exists}")
    indices = [int(index) for index in wanted.split(",")]
    for index in indices:
        if index >= visible:
            raise ValueError(f"device {index} in '{text}' does not exist. {exists}")
    if len(set(indices)) != len(indices):
        raise ValueError(f"'{text}' names a device twice. {exists}")
    if len(indices) > MAX_WORKERS:
        raise ValueError(f"'{text}' names {len(indices)} devices; at most {MAX_WORKERS} can work together. {exists}")
    return tuple(WorkerDevice(kind, index) for index in indices)


def _what_exists(kind: str, visible: int) -> str:
    if not visible:
        return f"This machine shows no accelerator, so only cpu:1 to cpu:{MAX_WORKERS} exist."
    listed = ", ".join(map(str, range(visible)))
    return f"Devices that exist: {listed} ({kind}), and cpu:1 to cpu:{MAX_WORKERS}."


def visible_devices_environment(device: WorkerDevice, environment: dict[str, str] | None = None) -> dict[str, str]:
    """Variables that show a worker its own device only.

    One visible device a worker: the host assumes device 0 everywhere and its dynamic
    memory initialises that one. Peers' buffers can still be opened: since CUDA 10.1 IPC
    handles work for devices that the process does not see. Indices count what *this*
    process sees, so a list that the user already set is looked up, not overwritten.
    """
    if device.kind == "cpu":
        return {}
    environment = dict(os.environ) if environment is None else environment
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if device.kind == "cuda" else ("ZE_AFFINITY_MASK",)
    seen = next((environment[name] for name in names if environment.get(name)), None)
    entries = [entry.strip() for entry in seen.split(",")] if seen else None
    own = entries[device.index] if entries and device.index < len(entries) else str(device.index)
    return dict.fromkeys(names, own)
