"""Turns a worker process into a headless ComfyUI. This file does not import torch.

The host's own ``main`` module is imported, not run: everything that it sets up while it
is imported (paths, memory management, precision flags) is then the same as in the UI
process, whatever the host's version. What it does only when run is left out, but for the
allocator's environment, which has to be set before torch is imported.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def prepare(options: dict[str, Any]) -> None:
    """Before torch: the host's path, its command line and its allocator settings."""
    root = options["host_root"]
    sys.path.insert(0, root)
    # custom nodes come to expect this, and the host does it before it loads them
    sys.argv = [os.path.join(root, "main.py"), *options["arguments"]]
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    import comfy.options

    comfy.options.enable_args_parsing()
    import cuda_malloc  # noqa: F401
