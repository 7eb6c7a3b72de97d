"""Prepares a worker process to be a headless ComfyUI, before torch is imported. This file does not import torch.

Later the worker imports the host's ``main`` module, but does not run it: all that the host sets
up on import (paths, memory management, precision flags) is then as in ComfyUI's own process,
whatever the host's version. Missing is only what ``main`` does when it is run. Of that, a worker
needs the folder of temporary files, which loaders of uploaded files read, and the allocator's
environment, which has to be set before torch is imported.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def prepare(options: dict[str, Any]) -> None:
    """Set up the host's path, its command line and its allocator settings.

    Args:
        options: ``host_root``, the folder of ComfyUI, and ``arguments``, its command line.
    """
    root = options["host_root"]
    sys.path.insert(0, root)
    # custom nodes come to expect this, and the host does it before it loads them
    sys.argv = [os.path.join(root, "main.py"), *options["arguments"]]
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    import comfy.options

    comfy.options.enable_args_parsing()
    import cuda_malloc  # noqa: F401

    _set_temp_directory()


def _set_temp_directory() -> None:
    """As the host's ``main`` does when it is run."""
    import folder_paths
    from comfy.cli_args import args

    if args.temp_directory:
        folder_paths.set_temp_directory(os.path.join(os.path.abspath(args.temp_directory), "temp"))
