"""What a VAE is, in few enough bytes to compare over processes: its weights, the settings of its modules, and ComfyUI's own settings of it.

Everything has to be equal to the last bit. Samples of the weights stand for them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .module_settings import Settings, plain_text
from .options import name_of
from .weight_samples import mark_of

#: label -> hash; 0 for what cannot be read
Marks = dict[str, int]
#: by part
Digest = Mapping[str, Marks]
#: the parts of a digest
WEIGHTS, VALUES, MODULES, HOST = ("weights", "values of weights", "modules", "settings in ComfyUI")
_SENTENCES = {
    WEIGHTS: "its weight {} is of another kind",
    VALUES: "its weight {} has other values",
    MODULES: "its {} is another one",
    HOST: "its {} is another one",
}
#: of ComfyUI's VAE: where it computes, and what the rest of a digest says
_LEFT_OUT = ("device", "output_device", "first_stage_model", "patcher", "size")


def vae_digest(vae: Any) -> dict[str, Marks]:
    """The parts of a ``comfy.sd.VAE``."""
    local, patcher = vae.first_stage_model, vae.patcher
    weights = dict(_weights(local, patcher))
    settings = Settings(local.modules())
    modules = {path or "its module": name_of(type(module)) for path, module in local.named_modules()}
    for path, module in local.named_modules():
        modules |= {f"{path}.{name}".lstrip("."): _text(value) for name, value in settings.of(module)}
    return {
        WEIGHTS: _marks({name: f"{tuple(weight.shape)} {weight.dtype}" for name, weight in weights.items()}),
        VALUES: values_of(local, patcher),
        MODULES: _marks(modules),
        HOST: _marks({name: _text(value) for name, value in vars(vae).items() if name not in _LEFT_OUT}),
    }


def difference(mine: Digest, theirs: Digest) -> str | None:
    """What of a VAE is another one elsewhere, for people; None where nothing is."""
    for part, marks in mine.items():
        if name := first_difference(marks, theirs[part]):
            return _SENTENCES[part].format(name)
    return None


def first_difference(mine: Marks, other: Marks) -> str | None:
    """The first label whose hashes are others, as far as they are known."""
    if mine.keys() != other.keys():
        return sorted(mine.keys() ^ other.keys())[0]
    return next((label for label, mark in mine.items() if mark != other[label] and mark and other[label]), None)


def values_of(local: nn.Module, patcher: Any) -> Marks:
    """A hash of samples of each weight, wherever it lies."""
    with torch.inference_mode():
        return {name: mark_of(name, weight) for name, weight in _weights(local, patcher)}


def _weights(local: nn.Module, patcher: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, weight or buffer), without what ComfyUI has patched in it for another branch."""
    for named in (local.named_parameters(), local.named_buffers()):
        for name, weight in sorted(named, key=lambda item: item[0]):
            kept = patcher.backup.get(name)
            yield name, weight if kept is None else kept.weight


def _marks(texts: Mapping[str, str]) -> Marks:
    return {label: zlib.crc32(f"{label}: {texts[label]}".encode()) or 1 for label in sorted(texts)}


def _text(value: Any) -> str:
    """What a setting says, in words that are the same in every process."""
    if (plain := plain_text(value)) is not None:
        return plain
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    function = getattr(value, "__func__", value)
    if not isinstance(function, FunctionType):
        return name_of(value)
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    inside = [_text(part) if not isinstance(part, FunctionType) else name_of(part) for part in held]
    return f"{name_of(function)} {_code(function.__code__)} {inside} {plain_text(function.__defaults__)}"


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _code(code: CodeType) -> str:
    constants = [_code(part) if isinstance(part, CodeType) else plain_text(part) or repr(part) for part in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
