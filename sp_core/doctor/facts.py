"""What this machine has, as plain data. Starts nothing.

A section is a function; add one to :data:`SECTIONS` to have it reported.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import memory_file
from ..host_path import find_comfyui
from ..pool.devices import accelerators, maker, parse_devices, platform_problem

Report = dict[str, Any]


def versions() -> Report:
    """Of Python, torch, what torch was built with, and packages that this extension uses."""
    import torch

    found: Report = {"python": platform.python_version(), "system": platform.platform(), "torch": torch.__version__}
    found["cuda"] = torch.version.cuda
    found["driver"] = _driver()
    found["hip"] = torch.version.hip
    if torch.version.cuda and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for package in ("safetensors", "einops", "ninja"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _driver() -> str | None:
    """Version of NVIDIA's kernel driver."""
    try:
        match = re.search(r"Kernel Module\S*\s+(?:for \S+\s+)?([0-9.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return match[1] if match else None


def devices() -> Report:
    """The accelerators, what ``auto`` makes of them, and which reach each other's memory."""
    import torch

    kind, count = accelerators()
    listed = []
    for index in range(count):
        module = getattr(torch, kind)
        properties = module.get_device_properties(index)
        listed.append({"index": index, "name": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)})
    chosen = parse_devices("auto", kind, count)
    meaning = f"{len(chosen)} workers" if len(chosen) > 1 else "the model is returned unchanged: there is nothing to share"
    found: Report = {"kind": kind, "accelerators": listed, "cpu_cores": os.cpu_count(), "auto": meaning}
    if problem := platform_problem(platform.system(), maker(kind)):
        found["problem"] = problem
    if kind == "cuda" and count > 1:
        found["peer_access"] = [[int(a == b or torch.cuda.can_device_access_peer(a, b)) for b in range(count)] for a in range(count)]
    return found


def host() -> Report:
    """The ComfyUI that runs this, or the one that would be found."""
    running = sys.modules.get("comfyui_version")
    if running is not None:
        return {"comfyui": str(Path(running.__file__ or "").parent), "version": running.__version__}
    path = find_comfyui()
    if path is None:
        return {"comfyui": None, "why": "no checkout was found; COMFYUI_PATH names one"}
    text = (path / "comfyui_version.py").read_text() if (path / "comfyui_version.py").exists() else ""
    match = re.search(r'__version__ = "([^"]+)"', text)
    return {"comfyui": str(path), "version": match[1] if match else None}


def memory() -> Report:
    """Kinds of shared memory that processes can exchange tensors in."""
    found: Report = {"memfd": memory_file.available()}
    shm = Path("/dev/shm")
    if shm.is_dir():
        found["dev_shm_free_gb"] = round(shutil.disk_usage(shm).free / 1e9, 2)
    return found


def compiled_parts() -> Report:
    """Whether the native code can be used. Builds it, as nothing else would tell."""
    from ..comm.native import gpu
    from ..comm.native.build import load_cpu

    reasons = {"cpu": load_cpu().reason, "cuda": gpu.unusable()}
    return {name: {"usable": not reason, "why_not": reason} for name, reason in reasons.items()}


#: what can be known without starting anything
SECTIONS: dict[str, Callable[[], Report]] = {
    "versions": versions,
    "devices": devices,
    "host": host,
    "memory": memory,
    "compiled_parts": compiled_parts,
}


def gather() -> dict[str, Report]:
    """All sections by name."""
    return {name: section() for name, section in SECTIONS.items()}
