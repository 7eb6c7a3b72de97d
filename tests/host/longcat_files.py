"""The tiny LongCat-Video and Avatar checkpoints in the two layouts that their files have, and a LoRA for the Avatar."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from distributed import avatar_ranks, longcat_ranks
from safetensors.torch import save_file
from torch import Tensor

from sp_core.models.longcat.keys import fused_parts, rekeyed_name


def weights() -> dict[str, Tensor]:
    """As the official file has them."""
    return _weights_in(longcat_ranks.reference())


def avatar_weights() -> dict[str, Tensor]:
    return _weights_in(avatar_ranks.reference())


def _weights_in(fixture: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key[len("model.") :]: value for key, value in fixture.items() if key.startswith("model.")}


def rekeyed(official: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """As community files have them: Wan's module names, and no fused projections. Of LongCat-Video where nothing is given."""
    out = {}
    for key, value in (weights() if official is None else official).items():
        module, _, kind = key.rpartition(".")
        for name, part in zip(parts := fused_parts(module) or [module], value.chunk(len(parts)), strict=True):
            out[f"{rekeyed_name(name)}.{kind}"] = part.contiguous()
    return out


def official_lora(of: Mapping[str, Tensor], targets: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    """A LoRA in the official form.

    Args:
        of: weights as the official file has them.
        targets: module -> how many projections are fused in it.
    """
    generator = torch.Generator().manual_seed(seed)
    lora: dict[str, Tensor] = {}
    for module, parts in targets.items():
        outs, ins = of[f"{module}.weight"].shape
        stem = "lora___lorahyphen___" + module.replace(".", "___lorahyphen___")
        lora[f"{stem}.lora_down.weight"] = torch.randn(parts * 4, ins, generator=generator) / ins**0.5
        for part in range(parts):
            up = f"lora_up.blocks.{part}.weight" if parts > 1 else "lora_up.weight"
            lora[f"{stem}.{up}"] = torch.randn(outs // parts, 4, generator=generator) / 2
        lora[f"{stem}.alpha_scale"] = torch.tensor(0.5)
    return lora


def avatar_lora() -> dict[str, Tensor]:
    """A fused projection of the video, one of the sound, and a plain one."""
    targets = {"blocks.0.attn.qkv": 3, "blocks.1.audio_cross_attn.kv_linear": 2, "blocks.1.ffn.w2": 1}
    return official_lora(avatar_weights(), targets, 11)


def write_avatar(models: Path) -> None:
    """Both layouts and the LoRA, below the host's ``models``."""
    save_file(avatar_weights(), models / "diffusion_models" / "tiny_avatar.safetensors")
    save_file(rekeyed(avatar_weights()), models / "diffusion_models" / "tiny_avatar_rekeyed.safetensors")
    save_file(avatar_lora(), models / "loras" / "tiny_avatar_lora.safetensors")
