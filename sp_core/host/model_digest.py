"""What a MODEL is, in few enough bytes to compare over processes: its weights, its patches of weights, and the code put into it.

Names, shapes, types and functions have to be equal. The values of patches are sampled and compared with a tolerance: a merge
that is computed on two devices differs in its last bits. The values of weights are not: what lies in memory may be patched, or half loaded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .options import name_of, patches_in

#: values that lie side by side in a sample
RUN = 4
#: of a sample's norm. The last bit of bfloat16 is 4e-3, and merges round several times
TOLERANCE = 2e-2
#: the parts of a digest
WEIGHTS, WEIGHT_PATCHES, CODE = PARTS = ("weights", "weight patches", "code")


@dataclass
class Part:
    """One part of a MODEL. What it is lies in ``shape``, its sampled values in ``numbers``."""

    #: hash of all names, shapes and types
    shape: str
    #: (weighted sum, norm) of the samples of each value; None where it cannot be read
    numbers: list[list[float] | None]
    #: what each of ``numbers`` belongs to; it is not sent
    labels: list[str] = field(default_factory=list, repr=False)


def model_digest(patcher: Any, weights: dict[int, Part]) -> dict[str, Part]:
    """The parts of a ComfyUI ModelPatcher. The weights are those under its patches, wherever they lie.

    Args:
        weights: those of models that were read before, by the model's id. Clones share a model, so a chain of nodes reads one.
    """
    with torch.inference_mode():
        inside = {name: value for name, value in patcher.object_patches.items() if name.startswith("diffusion_model")}
        code = {
            "object patches": {name: _kind(value) for name, value in inside.items()},
            "patches": [(place, name_of(function)) for place, function in patches_in(patcher.model_options.get("transformer_options", {}))],
            "weight wrappers": sorted(patcher.weight_wrapper_patches),
            "injections": sorted(patcher.injections),
        }
        if id(patcher.model) not in weights:
            weights[id(patcher.model)] = _part({name: f"{tuple(weight.shape)} {weight.dtype}" for name, weight in own_weights(patcher)})
        return {WEIGHTS: weights[id(patcher.model)], WEIGHT_PATCHES: _part(patcher.patches), CODE: _part(code)}


def as_plain(digest: dict[str, Part]) -> dict[str, Any]:
    """What is sent of a digest."""
    return {name: {**asdict(part), "labels": []} for name, part in digest.items()}


def from_plain(plain: dict[str, Any]) -> dict[str, Part]:
    return {name: Part(**part) for name, part in plain.items()}


def difference(mine: dict[str, Part], theirs: dict[str, Part], parts: Collection[str] = PARTS) -> str | None:
    """What two MODELs differ in; None for those whose ``parts`` are equal."""
    for name, part in mine.items():
        if name not in parts:
            continue
        other = theirs[name]
        if part.shape != other.shape or len(part.numbers) != len(other.numbers):
            return f"the {name} are others" if name != CODE else "the functions and modules put into it are others"
        for a, b in zip(part.numbers, other.numbers, strict=True):
            if a is not None and b is not None and not abs(a[0] - b[0]) <= TOLERANCE * max(a[1], b[1]):
                return f"the {name} have other values"
    return None


def own_weights(patcher: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of the diffusion model without patches.

    Clones share one model, in which ComfyUI leaves patched weights and replaced modules; their backup has what was there.
    """
    module = getattr(patcher.model, "diffusion_model", patcher.model)
    prefix = "diffusion_model." if module is not patcher.model else ""
    replaced = {path: value for path, value in patcher.object_patches_backup.items() if isinstance(value, (torch.nn.Module, Tensor))}
    for name, weight in module.named_parameters():
        name = prefix + name
        if not any(name == path or name.startswith(f"{path}.") for path in replaced):
            kept = patcher.backup.get(name)
            yield name, weight if kept is None else kept.weight
    for path, value in replaced.items():
        if path.startswith(prefix):
            parts = {"": value} if isinstance(value, Tensor) else dict(value.named_parameters())
            yield from ((f"{path}.{name}".rstrip("."), weight) for name, weight in parts.items())


def _part(tree: Any) -> Part:
    found, part = hashlib.blake2b(digest_size=16), Part("", [])
    for label, value in _leaves(tree, ""):
        if isinstance(value, (Tensor, float)):
            part.labels.append(label)
            part.numbers.append(_sampled(value) if isinstance(value, Tensor) else [value, abs(value)])
            value = (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else "number"
        found.update(f"{label}: {value}\n".encode())
    part.shape = found.hexdigest()
    return part


def _leaves(value: Any, label: str) -> Iterator[tuple[str, Any]]:
    """(label, leaf): a tensor, a number as float, or a text that says what something is."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{label}.{key}" if label else str(key))
    elif isinstance(value, (list, tuple)):
        yield label, len(value)
        for item in value:
            yield from _leaves(item, label)
    elif isinstance(value, Tensor):
        yield label, value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield label, float(value)
    elif value is None or isinstance(value, (str, bool, torch.dtype)):
        yield label, str(value)
    else:
        yield label, _kind(value)
        # the adapter of a LoRA
        yield from _leaves(getattr(value, "weights", None), label)


def _kind(value: Any) -> str:
    return name_of(value)


def _sampled(tensor: Tensor) -> list[float] | None:
    try:
        plain = plain_tensor(tensor.detach())
        if plain.numel() == 0 or plain.device.type == "meta":
            return None
        plain = plain.reshape(1) if plain.dim() == 0 else plain
        places = torch.unravel_index(torch.tensor(_places(plain.numel())), plain.shape)
        values = [float(value) for value in plain[tuple(place.to(plain.device) for place in places)].tolist()]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None  # a format that cannot be read at a place
    total, norm = sum(value * (i + 1) for i, value in enumerate(values)) / len(values), math.hypot(*values)
    return [total, norm] if math.isfinite(total) and math.isfinite(norm) else None


def _places(count: int) -> list[int]:
    """Two runs, as each place apart from others can be another read of the disk."""
    return [min(count - 1, start + i) for start in (count // 3, 2 * count // 3) for i in range(RUN)]


def plain_tensor(tensor: Tensor) -> Tensor:
    """What a quantised tensor packs, as it lies in the file; float8 as bytes."""
    packed = getattr(tensor, "_qdata", tensor)
    if type(packed) not in (Tensor, torch.nn.Parameter):
        packed = packed.as_subclass(Tensor)
    return packed.view(torch.uint8) if packed.dtype.is_floating_point and packed.dtype.itemsize == 1 else packed
