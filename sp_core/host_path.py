"""Where the host is: a ComfyUI checkout. Standard library only, as this is asked before anything is installed."""

from __future__ import annotations

import os
from pathlib import Path

#: this extension's own folder
EXTENSION = Path(__file__).resolve().parents[1]


def find_comfyui() -> Path | None:
    """A ComfyUI checkout: $COMFYUI_PATH, else the one that this extension lives in, else ~/ComfyUI; None where there is none."""
    candidates = [EXTENSION.parent.parent, Path.home() / "ComfyUI"]
    if os.environ.get("COMFYUI_PATH"):
        candidates = [Path(os.environ["COMFYUI_PATH"]).expanduser()]
    return next((path for path in candidates if (path / "comfy").is_dir() and (path / "main.py").is_file()), None)
