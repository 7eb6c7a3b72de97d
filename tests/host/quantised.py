"""Tiny quantised checkpoints in ComfyUI's own formats. Run as a script: ``python quantised.py <ComfyUI> <folder>``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

#: of ComfyUI's ``QUANT_ALGOS``
FORMATS = ("float8_e4m3fn", "int8_tensorwise", "nvfp4")
SOURCE = "tiny_wan_t2v"
#: not quantised, but in half the bytes
BF16 = "bf16"


def file_name(form: str) -> str:
    return f"{SOURCE}_{form}"


def write(folder: Path, form: str) -> None:
    """The linear layers of the blocks are quantised, all else stays as it is."""
    import torch
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
    from safetensors.torch import load_file, save_file

    layout, weights = QUANT_ALGOS[form]["comfy_tensor_layout"], {}
    for name, weight in load_file(folder / f"{SOURCE}.safetensors").items():
        if weight.dim() == 2 and name.startswith("blocks.") and name.endswith(".weight"):
            weights |= QuantizedTensor.from_float(weight, layout, scale="recalculate").state_dict(name)
            told = json.dumps({"format": form}).encode()
            weights[f"{name.removesuffix('weight')}comfy_quant"] = torch.tensor(list(told), dtype=torch.uint8)
        else:
            weights[name] = weight
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / f"{file_name(form)}.safetensors")


def write_bf16(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / f"{SOURCE}.safetensors")
    save_file({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, folder / f"{file_name(BF16)}.safetensors")


if __name__ == "__main__":
    host, target = sys.argv[1:]
    sys.argv[1:] = []
    sys.path[:0] = [host]
    from comfy.cli_args import args

    args.cpu = True
    for each in FORMATS:
        write(Path(target), each)
    write_bf16(Path(target))
