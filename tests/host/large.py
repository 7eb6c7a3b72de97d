"""A Wan checkpoint, large beside what a process needs by itself. Run as a script: ``python large.py <ComfyUI> <folder> [larger]``."""

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

#: one of 2 GB, whose blocks are small beside a rank's part
LARGER, LARGER_LAYERS = "larger_wan", 28
LARGER_ARGUMENTS = {**ARGUMENTS, "dim": 1024, "ffn_dim": 4096, "num_heads": 8, "num_layers": LARGER_LAYERS}


def write(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / f"{FILES[0]}.safetensors"
    _write(path, ARGUMENTS)
    save_file({name: weight.half() for name, weight in load_file(path).items()}, folder / f"{FILES[1]}.safetensors")


def write_larger(folder: Path) -> None:
    _write(folder / f"{LARGER}.safetensors", LARGER_ARGUMENTS)


def _write(path: Path, arguments: dict[str, Any]) -> None:
    from sp_core.demo.checkpoints import write_all

    write_all(path.parent, {path.name: ("comfy.ldm.wan.model", "WanModel", arguments, None)})


if __name__ == "__main__":
    host, target, *larger = sys.argv[1:]
    sys.argv[1:] = []
    sys.path[:0] = [host, str(Path(__file__).resolve().parents[2])]
    from comfy.cli_args import args

    args.cpu = True
    (write_larger if larger else write)(Path(target))
