"""What a MODEL is, in few enough bytes to compare over processes: its weights, its patches of weights, and the code put into it.

Names, shapes, types and functions have to be equal. The values of patches are sampled and compared with a tolerance: a merge
that is computed on two devices differs in its last bits. Some matrices are sampled, which is what training and merging change;
more than a few that differ in one bit make another model. A few may: a weight that no file has holds what was in memory. One of
nothing but zeros is left out: code that swaps blocks keeps their weights elsewhere meanwhile.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .options import name_of, patches_in
from .weight_samples import plain_tensor, sampled_places, samples_of

#: values that lie side by side in a sample
RUN = 4
#: of a sample's norm. The last bit of bfloat16 is 4e-3, and merges round several times
TOLERANCE = 2e-2
#: matrices whose values are looked at, and how much of them may differ
LOOKED_AT, FEW = 32, 0.25
#: the parts of a digest
WEIGHTS, VALUES, WEIGHT_PATCHES, CODE = PARTS = ("weights", "values of weights", "weight patches", "code")


@dataclass
class Part:
    """One part of a MODEL. What it is lies in ``shape``, its sampled values in ``numbers``."""

    #: hash of all names, shapes and types
    shape: str
    #: (weighted sum, norm) of the samples of each value, or (hash, 0) of those of a weight; None where it cannot be read
    numbers: list[list[float] | None]
    #: what each of ``numbers`` belongs to; it is not sent
    labels: list[str] = field(default_factory=list, repr=False)


#: what weights are, and the values of some, by the model's id
Weights = dict[int, tuple[Part, Part]]


def model_digest(patcher: Any, weights: Weights) -> dict[str, Part]:
    """The parts of a ComfyUI ModelPatcher. The weights are those under its patches, wherever they lie.

    Args:
        weights: those of models that were read before. Clones share a model, so a chain of nodes reads one.
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
            weights[id(patcher.model)] = _weights(dict(own_weights(patcher)))
        what, values = weights[id(patcher.model)]
        return {WEIGHTS: what, VALUES: values, WEIGHT_PATCHES: _part(patcher.patches), CODE: _part(code)}


def as_plain(digest: dict[str, Part]) -> dict[str, Any]:
    """What is sent of a digest."""
    return {name: {**asdict(part), "labels": []} for name, part in digest.items()}


def from_plain(plain: dict[str, Any]) -> dict[str, Part]:
    return {name: Part(**part) for name, part in plain.items()}


def difference(mine: dict[str, Part], theirs: dict[str, Part], parts: Collection[str] = PARTS) -> str | None:
    """What two MODELs differ in; None for those whose ``parts`` are equal."""
    for name, part in mine.items():
        if name in parts and (what := _SENTENCES[name](part, theirs[name])) is not None:
            return what
    return None


def _other_part(name: str, mine: Part, other: Part) -> str | None:
    if mine.shape != other.shape or len(mine.numbers) != len(other.numbers):
        return f"the {name} are others"
    if any(a is not None and b is not None and _apart(a, b) for a, b in zip(mine.numbers, other.numbers, strict=True)):
        return f"the {name} have other values"
    return None


def _other_weights(mine: Part, other: Part) -> str | None:
    """Of weights of one kind; that they are of another one, their own part tells."""
    if mine.shape != other.shape:
        return None
    compared = [_apart(a, b) for a, b in zip(mine.numbers, other.numbers, strict=True) if a is not None and b is not None]
    if sum(compared) <= FEW * len(compared):
        return None
    return "the weights have other values (if their file was replaced since ComfyUI read it, free the models and the node cache)"


def _apart(a: list[float], b: list[float]) -> bool:
    return not abs(a[0] - b[0]) <= TOLERANCE * max(a[1], b[1])


_SENTENCES: dict[str, Callable[[Part, Part], str | None]] = {
    WEIGHTS: partial(_other_part, "weights"),
    VALUES: _other_weights,
    WEIGHT_PATCHES: partial(_other_part, "weight patches"),
    CODE: partial(_other_part, "functions and modules put into it"),
}


def own_weights(patcher: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of the diffusion model without patches.

    Clones share one model, in which ComfyUI leaves patched weights and replaced modules; their backup has what was there.
    """
    module = getattr(patcher.model, "diffusion_model", patcher.model)
    prefix = "diffusion_model." if module is not patcher.model else ""
    replaced = {path: value for path, value in patcher.object_patches_backup.items() if isinstance(value, (torch.nn.Module, Tensor))}
    # what took a module's place may have its weights, as a compiled block has: patched by their name before or by the one since
    shared = {id(weight): patcher.backup.get(prefix + name) for name, weight in module.named_parameters()}
    for name, weight in module.named_parameters():
        name = prefix + name
        if not any(name == path or name.startswith(f"{path}.") for path in replaced):
            kept = patcher.backup.get(name)
            yield name, weight if kept is None else kept.weight
    for path, value in replaced.items():
        if path.startswith(prefix):
            parts = {"": value} if isinstance(value, Tensor) else dict(value.named_parameters())
            for name, weight in parts.items():
                name = f"{path}.{name}".rstrip(".")
                kept = (shared[id(weight)] or patcher.backup.get(name)) if id(weight) in shared else None
                yield name, weight if kept is None else kept.weight


def _weights(weights: dict[str, Tensor]) -> tuple[Part, Part]:
    """What all weights are, and the values of some matrices, from the first to the last by name."""
    kinds = _part({name: f"{tuple(weight.shape)} {weight.dtype}" for name, weight in weights.items()})
    names = sorted(name for name, weight in weights.items() if weight.dim() > 1)
    looked_at = [names[place] for place in sampled_places(len(names), LOOKED_AT).tolist()]
    samples = [samples_of(weights[name]) for name in looked_at]
    return kinds, Part(kinds.shape, [[zlib.crc32(found), 0.0] if found and any(found) else None for found in samples], looked_at)


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
