"""Every touch of ComfyUI's internals, tried on each ComfyUI that is here: the newest, and older ones beside it (``~/ComfyUI-*``)."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from campaign import parameters
from host.probes import PROBES

from sp_core.host_path import find_comfyui

SCRIPT = Path(__file__).with_name("comfy_api_probes.py")


def hosts() -> list[Any]:
    """The newest ComfyUI; a campaign adds the older ones."""
    newest = find_comfyui() or Path("no ComfyUI")
    beside = os.environ.get("COMFYUI_OLDER", "").split(os.pathsep) if os.environ.get("COMFYUI_OLDER") else Path.home().glob("ComfyUI-*")
    older = [Path(path) for path in beside if (Path(path) / "main.py").is_file()]
    return parameters(plain=[newest], campaign=sorted(older))


@functools.cache
def probed(host: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(SCRIPT), str(host)], capture_output=True, text=True, timeout=300, cwd=host)
    line = next((line for line in done.stdout.splitlines() if line.startswith("probes: ")), None)
    assert line is not None, f"ComfyUI in {host} could not be imported headless:\n{done.stderr[-3000:]}"
    return json.loads(line.removeprefix("probes: "))


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("host", hosts(), ids=lambda path: path.name)
def test_the_host_is_as_expected(host: Path, name: str) -> None:
    result = probed(host)
    assert not result["found"][name], f"ComfyUI {result['version']}: {result['found'][name]}"
