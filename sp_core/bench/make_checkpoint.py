"""A checkpoint of one of the host's classes with random weights: ``python -m sp_core.bench.make_checkpoint HOST FILE SPEC``.

SPEC is JSON: ``module``, ``class``, ``arguments``, and ``config``, which goes to the file's metadata.
Runs as a process of its own because it imports the host.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..demo.checkpoints import random_weights


def write(path: Path, spec: dict[str, Any]) -> None:
    """fp32. Needs the host on sys.path."""
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops

    with torch.device("meta"):
        model_class = getattr(importlib.import_module(spec["module"]), spec["class"])
        model = model_class(**spec["arguments"], dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init)
    metadata = {"config": json.dumps({"transformer": spec["config"]})} if spec.get("config") else None
    save_file(random_weights(model, 0), path, metadata)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    write(Path(sys.argv[2]), json.loads(sys.argv[3]))
