"""A Wan checkpoint that is large beside what a process needs by itself. Run as a script: ``python large.py <ComfyUI> <folder>``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

LAYERS = 8
ARGUMENTS: dict[str, Any] = {
    "model_type": "t2v",
    "dim": 768,
    "ffn_dim": 3072,
    "num_heads": 6,
    "num_layers": LAYERS,
    "in_dim": 16,
    "out_dim": 16,
}
#: the same weights in fp32, and in a dtype that is cast
FILES = ("large_wan", "large_wan_fp16")


def write(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    from sp_core.demo.checkpoints import write_all

    [path] = write_all(folder, {f"{FILES[0]}.safetensors": ("comfy.ldm.wan.model", "WanModel", ARGUMENTS, None)})
    save_file({name: weight.half() for name, weight in load_file(path).items()}, folder / f"{FILES[1]}.safetensors")


if __name__ == "__main__":
    host, target = sys.argv[1:]
    sys.argv[1:] = []
    sys.path[:0] = [host, str(Path(__file__).resolve().parents[2])]
    from comfy.cli_args import args

    args.cpu = True
    write(Path(target))
