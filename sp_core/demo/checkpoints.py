"""Tiny checkpoints with the real architectures and random weights.

Shapes come from the host's own classes, so a host that changes them gets what it expects.
Run as a script, as it imports the host: ``python checkpoints.py <ComfyUI> <folder> [<more checkpoints, JSON>]``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: arguments of the host's classes
WAN = {"model_type": "t2v", "dim": 384, "ffn_dim": 256, "num_heads": 3, "num_layers": 3, "in_dim": 16, "out_dim": 16}
_LTX = {"attention_head_dim": 32, "num_attention_heads": 4, "cross_attention_dim": 128, "caption_channels": 48, "num_layers": 3}
LTXAV = {
    **_LTX,
    "audio_attention_head_dim": 16,
    "audio_num_attention_heads": 4,
    "audio_cross_attention_dim": 64,
    "positional_embedding_max_pos": [20, 2048, 2048],
    "audio_positional_embedding_max_pos": [20],
    "use_middle_indices_grid": True,
    "rope_type": "split",
    "frequencies_precision": "float64",
    "connector_attention_head_dim": 16,
    "connector_num_attention_heads": 3,
    "connector_num_layers": 1,
}

#: (module, class, constructor arguments, metadata config or None)
Checkpoint = tuple[str, str, dict[str, Any], dict[str, Any] | None]

#: by file name
CHECKPOINTS: dict[str, Checkpoint] = {
    "tiny_wan_t2v.safetensors": ("comfy.ldm.wan.model", "WanModel", WAN, None),
    "tiny_wan_t2v_low.safetensors": ("comfy.ldm.wan.model", "WanModel", WAN, None),
    "tiny_wan_i2v.safetensors": ("comfy.ldm.wan.model", "WanModel", {**WAN, "model_type": "i2v", "in_dim": 36}, None),
    "tiny_wan_flf.safetensors": (
        "comfy.ldm.wan.model",
        "WanModel",
        {**WAN, "model_type": "i2v", "in_dim": 36, "flf_pos_embed_token_number": 514},
        None,
    ),
    "tiny_wan_ref.safetensors": ("comfy.ldm.wan.model", "WanModel", {**WAN, "in_dim_ref_conv": 16}, None),
    "tiny_wan22_5b.safetensors": ("comfy.ldm.wan.model", "WanModel", {**WAN, "in_dim": 48, "out_dim": 48}, None),
    "tiny_ltxv.safetensors": ("comfy.ldm.lightricks.model", "LTXVModel", _LTX, _LTX),
    "tiny_ltxav.safetensors": ("comfy.ldm.lightricks.av_model", "LTXAVModel", LTXAV, LTXAV),
    "tiny_ltxav_23.safetensors": (
        "comfy.ldm.lightricks.av_model",
        "LTXAVModel",
        {**LTXAV, "cross_attention_adaln": True, "apply_gated_attention": True, "caption_proj_before_connector": True},
        {**LTXAV, "cross_attention_adaln": True, "apply_gated_attention": True, "caption_proj_before_connector": True},
    ),
}


def random_weights(model: Any, seed: int) -> dict[str, Any]:
    """Weights that keep activations near one, and no two rows alike."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in ((name, tensor.shape) for name, tensor in model.state_dict().items()):
        noise = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            weights[name] = 1 + 0.1 * noise
        elif len(shape) > 1 and name.endswith("weight"):
            weights[name] = noise / math.sqrt(math.prod(shape[1:]))
        else:
            weights[name] = 0.1 * noise
    return weights


def write_all(folder: Path, checkpoints: Mapping[str, Checkpoint] = CHECKPOINTS, first_seed: int = 0) -> list[Path]:
    """Write the checkpoints that are not there yet. Needs the host on sys.path."""
    import importlib

    import comfy.ops
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for seed, (name, (module, class_name, arguments, config)) in enumerate(checkpoints.items(), start=first_seed):
        path = folder / name
        if path.exists():
            continue
        with torch.device("meta"):
            model_class = getattr(importlib.import_module(module), class_name)
            model = model_class(**arguments, dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init)
        metadata = {"config": json.dumps({"transformer": config})} if config else None
        save_file(random_weights(model, seed), path, metadata)
        written.append(path)
    return written


def write_lora(checkpoint: Path, path: Path, rank: int = 4) -> None:
    """A LoRA for every attention projection of a tiny Wan checkpoint, strong enough to be seen."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(7)
    weights = {}
    with safe_open(str(checkpoint), "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.endswith(("attn.q.weight", "attn.v.weight", "attn.o.weight")):
                out_features, in_features = file.get_slice(name).get_shape()
                stem = f"diffusion_model.{name.removesuffix('.weight')}"
                weights[f"{stem}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) / math.sqrt(in_features)
                weights[f"{stem}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator)
    save_file(weights, path)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    target, more = Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    # the host reads its own arguments from here
    del sys.argv[1:]
    import comfy.options  # noqa: F401  (arguments are not parsed: comfy.cli_args keeps its defaults)
    from comfy.cli_args import args

    args.cpu = True
    write_all(target, CHECKPOINTS | more)
    write_lora(target / "tiny_wan_t2v.safetensors", target.parent / "loras" / "tiny_wan_lora.safetensors")
