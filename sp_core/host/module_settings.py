"""What a module is beside its weights: the numbers, flags, texts and objects that the code of its class reads and does not write.

What this code writes after the module was made is its state, such as a cache. What ComfyUI writes manages its memory. Neither
says what the model computes, so both may differ between two processes, or between two looks.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from . import comfy_api
from .options import name_of

#: what no attribute has
MISSING = object()
#: functions that make a module, by the beginning of their names
_MAKING = ("__init__", "_init_", "init_", "build_", "__setstate__", "reset_parameters")
#: names of this form ComfyUI makes of the names of weights
_MANAGED_ENDS = ("_function", "_comfy_model_dtype")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_CONTAINERS = (list, tuple, set, frozenset, dict)
#: of torch's, not the code's: a forward reads ``training`` only
_TORCHS = frozenset(nn.Module().__dict__) - {"training"}


def plain_text(value: Any) -> str | None:
    """What plain data says, so that it can be kept and compared; None for what holds anything but numbers, texts and containers.

    A container that is empty, or whose keys are no texts, is a place for what the code keeps, and says nothing either.
    """
    if not isinstance(value, _CONTAINERS):
        return repr(value) if isinstance(value, _PLAIN) else None
    if not value or (isinstance(value, dict) and not all(isinstance(key, str) for key in value)):
        return None
    texts = list(map(plain_text, chain.from_iterable(value.items()) if isinstance(value, dict) else value))
    if None in texts:
        return None
    told = [str(text) for text in texts]
    return f"{type(value).__name__}({', '.join(sorted(told) if isinstance(value, (set, frozenset)) else told)})"


def can_change_in_place(value: Any) -> bool:
    """A container that is, or holds, a list, a set or a dict: it can say something else and be the same object."""
    if isinstance(value, (tuple, frozenset)):
        return any(map(can_change_in_place, value))
    return isinstance(value, (list, set, dict))


def same(then: Any, now: Any) -> bool:
    """Two values of an attribute are one object, or say the same."""
    return then is now or ((text := plain_text(then)) is not None and text == plain_text(now))


def told(value: Any) -> str:
    """What a value says, or is, for messages."""
    return "nothing" if value is MISSING else plain_text(value) or name_of(value)


def containers_of(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """(name, container, what it says) of the attributes of ``module`` that can say something else and be the same object."""
    for name, value in vars(module).items():
        if name not in _TORCHS and can_change_in_place(value) and (text := plain_text(value)) is not None:
            yield name, value, text


class Settings:
    """Tells which attributes of the modules of a model are settings."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kinds = [kind for kind in {base: None for module in modules for base in type(module).__mro__} if not _is_torchs(kind)]
        files = {kind.__module__: sys.modules.get(kind.__module__) for kind in kinds}
        self._written = names_written([*kinds, *(file for file in files.values() if file is not None)])
        self._mentioned: dict[type, frozenset[str]] = {}

    def is_setting(self, kind: type, name: str) -> bool:
        """The attribute ``name`` of a module of class ``kind`` is read by the code, and says what it computes."""
        if name in _TORCHS or name in self._written or is_managed(name):
            return False
        if kind not in self._mentioned:
            self._mentioned[kind] = names_mentioned(kind)
        return name in self._mentioned[kind]

    def is_written(self, name: str) -> bool:
        """The model's code writes an attribute, or a global, of this name."""
        return name in self._written

    def of(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """(name, value) of the settings that ``module`` itself has."""
        for name, value in sorted(vars(module).items()):
            if self.is_setting(type(module), name):
                yield name, value


def is_managed(name: str) -> bool:
    """ComfyUI writes attributes of this name into modules."""
    return name in _names_managed() or name.endswith(_MANAGED_ENDS)


@functools.lru_cache(maxsize=1)
def _names_managed() -> frozenset[str]:
    of_others, of_modules = comfy_api.memory_managers()
    return names_written(of_others, on_self=False) | names_written(of_modules)


def names_mentioned(kind: type) -> frozenset[str]:
    """Every name that the code of a class and of its bases reads or writes."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base not in (object, nn.Module):
            for code in _codes(base):
                found.update(code.co_names, (text for text in code.co_consts if isinstance(text, str)))
    return frozenset(found)


def names_written(owners: Iterable[type | ModuleType], on_self: bool = True) -> frozenset[str]:
    """The names of attributes and globals that functions of classes and of Python modules write, those left out that make an object.

    Args:
        on_self: count what a method writes on its own object.
    """
    return frozenset(
        name
        for owner in owners
        for code in _codes(owner)
        if not code.co_name.startswith(_MAKING)
        for target, name in _writes(code)
        if on_self or target != "self"
    )


def _writes(code: CodeType) -> Iterator[tuple[Any, str]]:
    """(what the name was written on, name); for a global, what happened to be loaded before it."""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_ATTR", "STORE_GLOBAL"):
            yield before, instruction.argval
        before = instruction.argval


def _codes(owner: type | ModuleType) -> Iterator[CodeType]:
    """The code of the functions that a class or a Python module defines, and of what is defined in them."""
    name = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    for value in list(vars(owner).values()):
        if isinstance(value, type):
            if value.__module__ == name and value.__qualname__.startswith(getattr(owner, "__qualname__", "")):
                yield from _codes(value)
            continue
        parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        for function in map(_unwrapped, parts):
            if isinstance(function, FunctionType) and function.__module__ == name:
                yield from _nested(function.__code__)


def _unwrapped(function: Any) -> Any:
    while isinstance(inner := getattr(function, "__wrapped__", getattr(function, "func", None)), FunctionType | functools.partial):
        function = inner
    return function


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _is_torchs(kind: type) -> bool:
    return kind is object or kind.__module__.partition(".")[0] == "torch"
