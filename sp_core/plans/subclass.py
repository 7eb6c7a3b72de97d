"""Models whose class a node pack made of a class that has a plan."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

from torch import nn

from .plan import SequencePlan

#: where ComfyUI's models, torch's modules and this extension's own models are defined
_READ = ("comfy.", "torch.", f"{__name__.removesuffix('.plans.subclass')}.")
#: what a class may have of its own without changing what is computed
_HARMLESS = ("__init__", "__repr__", "extra_repr")


def base_of_pack(kind: type) -> type:
    """The nearest class that no pack made: ``kind`` itself, or a base of it."""
    return next(base for base in kind.__mro__ if not is_of_pack(base))


def is_of_pack(kind: type) -> bool:
    return kind is not object and not f"{kind.__module__}.".startswith(_READ)


def replaced_methods(kind: type) -> list[str]:
    """Names of the methods that classes of a pack have in the place of the model's own."""
    base = base_of_pack(kind)
    classes = kind.__mro__[: kind.__mro__.index(base)]
    names = dict.fromkeys(name for found in classes for name, value in vars(found).items() if isinstance(value, FunctionType))
    return [name for name in names if name not in _HARMLESS and hasattr(base, name)]


def code_of_packs(plan: SequencePlan, model: nn.Module, kind: type) -> str | None:
    """Name of a class whose code computes in the place of the model's: of the model, one of its blocks or an attention in one.

    The plan knows nothing of such code, so nothing can be split around it.

    Args:
        kind: the model's class, which may be another one once its patches are in place.
    """
    if replaced_methods(kind):
        return _name_of(kind)
    for found in _classes_in(plan, model):
        if is_of_pack(found) and replaced_methods(found):
            return _name_of(found)
    return None


def _classes_in(plan: SequencePlan, model: nn.Module) -> Iterator[type]:
    for blocks in plan.blocks:
        for block in blocks.of(model):
            yield type(block)
            for attention in blocks.attentions:
                yield type(block.get_submodule(attention.module))


def _name_of(kind: type) -> str:
    return f"{kind.__qualname__} of {kind.__module__.rsplit('/', 1)[-1]}"
