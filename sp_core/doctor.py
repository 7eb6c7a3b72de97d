"""What this machine has, what would be used, and why not what is faster: for people and, with --json, for scripts.

A section is a function that returns plain data; add one to :data:`SECTIONS` to have it reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .errors import SPError
from .pool.devices import accelerators, parse_devices

Report = dict[str, Any]


def versions() -> Report:
    import torch

    found: Report = {"python": platform.python_version(), "system": platform.platform(), "torch": torch.__version__}
    found["cuda"] = torch.version.cuda
    found["hip"] = torch.version.hip
    if torch.version.cuda and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for package in ("safetensors", "einops", "ninja"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def devices() -> Report:
    import torch

    kind, count = accelerators()
    listed = []
    for index in range(count):
        module = getattr(torch, kind)
        properties = module.get_device_properties(index)
        listed.append({"index": index, "name": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)})
    chosen = parse_devices("auto", kind, count)
    meaning = f"{len(chosen)} workers" if len(chosen) > 1 else "the model is returned unchanged: there is nothing to share"
    return {"kind": kind, "accelerators": listed, "cpu_cores": os.cpu_count(), "auto": meaning}


def host() -> Report:
    from .demo.comfy_server import find_comfyui

    path = find_comfyui()
    if path is None:
        return {"comfyui": None, "why": "no checkout was found; COMFYUI_PATH names one"}
    text = (path / "comfyui_version.py").read_text() if (path / "comfyui_version.py").exists() else ""
    match = re.search(r'__version__ = "([^"]+)"', text)
    return {"comfyui": str(path), "version": match[1] if match else None}


def memory() -> Report:
    found: Report = {"memfd": hasattr(os, "memfd_create")}
    shm = Path("/dev/shm")
    if shm.is_dir():
        found["dev_shm_free_gb"] = round(shutil.disk_usage(shm).free / 1e9, 2)
    return found


def compiled_parts() -> Report:
    """Building them is how to know."""
    from .comm.extension import load_cpu, load_cuda

    return {name: {"usable": not part.reason, "why_not": part.reason} for name, part in (("cpu", load_cpu()), ("cuda", load_cuda()))}


def transport() -> Report:
    """What a real pool chooses: all accelerators if there are two, else two CPU workers."""
    from .reference import ReferenceConfig
    from .reference.sample import open_pool

    kind, count = accelerators()
    chosen = parse_devices("auto" if count > 1 else "cpu:2", kind, count)
    try:
        with open_pool(ReferenceConfig(layers=1), 0, chosen) as pool:
            answer = pool.call("transport", None)
    except SPError as error:
        return {"devices": [str(device) for device in chosen], "error": str(error)}
    return {"devices": [str(device) for device in chosen], **answer}


SECTIONS: dict[str, Callable[[], Report]] = {
    "versions": versions,
    "devices": devices,
    "host": host,
    "memory": memory,
    "compiled_parts": compiled_parts,
    "transport": transport,
}


def examine() -> dict[str, Report]:
    """All sections by name."""
    return {name: section() for name, section in SECTIONS.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; 1 if no pool could be started."""
    parser = argparse.ArgumentParser(prog="doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    if options.json:
        # the workers' news would stand between what a script reads
        os.environ["SP_LOG_LEVEL"] = "WARNING"
    report = examine()
    print(json.dumps(report) if options.json else "\n".join(as_text(report)), file=sys.stdout)
    return 1 if "error" in report["transport"] else 0


def as_text(report: dict[str, Report]) -> list[str]:
    lines = []
    for name, section in report.items():
        lines.append(name.replace("_", " "))
        for key, value in section.items():
            shown = [value] if not isinstance(value, list) or not value else value
            lines += [f"  {key.replace('_', ' '):<18}{_plain(entry)}" for entry in shown]
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_plain(entry)}" for key, entry in value.items() if entry not in ("", None))
    return {None: "none", True: "yes", False: "no", "": "-"}.get(value, str(value)) if not isinstance(value, list) else "none"
