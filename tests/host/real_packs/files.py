"""Files of the tiny models that packs' own loaders read. Run as a script: ``python files.py <models>``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file


def write_gguf(source: Path, target: Path, architecture: str, kind: gguf.GGMLQuantizationType) -> None:
    """Matrices whose rows are whole blocks are quantised, all else stays as it is."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    writer = gguf.GGUFWriter(str(target), architecture)
    for name, value in load_file(source).items():
        if value.ndim > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(size) for size in value.shape])
            value = value.reshape(value.shape[0], -1)
        fits = value.ndim == 2 and value.shape[1] % block == 0 and "blocks" in name and name.endswith(".weight")
        packed = gguf.quants.quantize(value.astype(np.float32), kind) if fits else value.astype(np.float32)
        writer.add_tensor(name, packed, raw_dtype=kind if fits else gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_whole(source: Path, target: Path) -> None:
    """A checkpoint as a release has it: the model's weights below ``model.diffusion_model``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Any] = {f"model.diffusion_model.{name}": value for name, value in load_file(source).items()}
    save_file(weights, target)


def write_lora(source: Path, target: Path, rank: int = 4) -> None:
    """For every attention of a tiny LTX checkpoint, strong enough to be seen."""
    generator = np.random.default_rng(3)
    weights: dict[str, Any] = {}
    for name, value in load_file(source).items():
        if name.endswith(("to_q.weight", "to_v.weight")) and "transformer_blocks" in name:
            stem = f"diffusion_model.{name.removesuffix('.weight')}"
            weights[f"{stem}.lora_A.weight"] = (generator.standard_normal((rank, value.shape[1])) / value.shape[1] ** 0.5).astype(
                np.float32
            )
            weights[f"{stem}.lora_B.weight"] = generator.standard_normal((value.shape[0], rank)).astype(np.float32)
    save_file(weights, target)


if __name__ == "__main__":
    models = Path(sys.argv[1])
    folder = models / "diffusion_models"
    wan, ltxv = folder / "tiny_wan_t2v.safetensors", folder / "tiny_ltxv.safetensors"
    kinds = gguf.GGMLQuantizationType
    write_gguf(wan, folder / "tiny_wan_q8.gguf", "wan", kinds.Q8_0)
    write_gguf(wan, folder / "tiny_wan_q4.gguf", "wan", kinds.Q4_0)
    write_gguf(ltxv, folder / "tiny_ltxv_q8.gguf", "ltxv", kinds.Q8_0)
    write_gguf(folder / "tiny_avatar.safetensors", folder / "tiny_avatar_q8.gguf", "wan", kinds.Q8_0)
    write_gguf(folder / "tiny_avatar_rekeyed.safetensors", folder / "tiny_avatar_rekeyed_q4.gguf", "wan", kinds.Q4_0)
    write_whole(wan, models / "checkpoints" / "tiny_wan_whole.safetensors")
    write_lora(folder / "tiny_ltxav.safetensors", models / "loras" / "tiny_ltx_lora.safetensors")
