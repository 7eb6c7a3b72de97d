"""LongCat-Video's LoRA files, in the host's terms. Plain torch.

The official files have a separator word in their keys, a factor instead of an alpha and,
for a fused projection, one down matrix whose rows belong to several up matrices. A
community file has Wan's module names. Both are brought to one LoRA for each of q, k and
v; where the model's projection is fused, the host applies each to its rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .keys import FUSED_IN_LORA, fused_parts, rekeyed_name

_SEPARATOR = "___lorahyphen___"
_OFFICIAL = f"lora{_SEPARATOR}"
_UP_OF_PART = re.compile(r"lora_up\.blocks\.(\d+)\.weight")


def is_official(lora: Mapping[str, Any]) -> bool:
    return any(key.startswith(_OFFICIAL) for key in lora)


def convert_lora(lora: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An official file under keys that the host's LoRA loader knows.

    The factor that multiplies up @ down stays what it was: the host divides its alpha by
    the rank, so alpha becomes factor * rank.

    Raises:
        ValueError: a module's matrices do not fit together; the message names it.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    converted: dict[str, Tensor] = {}
    for key, value in lora.items():
        if key.startswith(_OFFICIAL):
            name, _, tensor = key[len(_OFFICIAL) :].partition(".")
            modules.setdefault(name.replace(_SEPARATOR, "."), {})[tensor] = value
        else:
            converted[key] = value
    for module, tensors in modules.items():
        for path, down_rI, up_Or in _parts(module, tensors):
            stem = f"diffusion_model.{path}"
            converted |= {f"{stem}.lora_down.weight": down_rI, f"{stem}.lora_up.weight": up_Or}
            if (factor := tensors.get("alpha_scale")) is not None:
                converted[f"{stem}.alpha"] = factor.float() * down_rI.size(0)
    return converted


def _parts(module: str, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """(module path, down (r, in), up (out, r)) of each projection that a module's tensors change."""
    down = tensors.get("lora_down.weight")
    ups = {int(match[1]): value for key, value in tensors.items() if (match := _UP_OF_PART.fullmatch(key))}
    paths = fused_parts(module, FUSED_IN_LORA)
    if down is not None and not ups and "lora_up.weight" in tensors:
        up = tensors["lora_up.weight"]
        if not paths:
            return [(module, down, up)]
        return [(path, down, rows.contiguous()) for path, rows in zip(paths, up.chunk(len(paths)), strict=True)]
    if down is None or len(ups) != len(paths) or not ups or down.size(0) % len(ups):
        raise ValueError(
            f"the LoRA's tensors for {module} do not fit together: {', '.join(f'{key} {tuple(t.shape)}' for key, t in tensors.items())}"
        )
    downs = down.chunk(len(ups))
    return [(path, downs[i].contiguous(), ups[i]) for i, path in enumerate(paths)]


def key_aliases(weights: Mapping[str, torch.Size] | Iterable[tuple[str, torch.Size]]) -> dict[str, Any]:
    """More names under which a LoRA may address the weights of a LongCat-Video model.

    Args:
        weights: (key, shape) of the model's state dict, keys behind ``diffusion_model.``.

    Returns:
        LoRA module name -> the host's target: a weight's key, or (key, (dim, start, length))
        for the rows of q, k or v in a fused weight.
    """
    aliases: dict[str, Any] = {}
    for key, shape in dict(weights).items():
        if not (key.startswith("diffusion_model.") and key.endswith(".weight")):
            continue
        module = key[len("diffusion_model.") : -len(".weight")]
        parts = fused_parts(module, FUSED_IN_LORA)
        targets: dict[str, Any] = {module: key}
        if parts:
            rows = shape[0] // len(parts)
            targets = {path: (key, (0, i * rows, rows)) for i, path in enumerate(parts)}
        for path, target in targets.items():
            for name in {path, rekeyed_name(path)}:
                aliases[f"diffusion_model.{name}"] = target
                aliases[f"lora_unet_{name.replace('.', '_')}"] = target
    return aliases
