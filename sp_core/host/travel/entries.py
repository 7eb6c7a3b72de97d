"""The form in which objects cross, which both sides know.

A value is None, a number or a text as it is, ["ref", i] for entry i of a table of objects, or a list that begins with another word.
An entry is a list that begins with its kind.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...errors import SPError

#: entries of these kinds never change
FIXED = ("module", "name", "python", "own", "method", "partial")
#: of Python's own, what may cross by its name
LIBRARIES = ("math", "functools", "itertools", "collections", "contextlib", "dataclasses", "enum", "types", "typing", "operator", "copy")
BUILTINS = (
    "object",
    "bool",
    "int",
    "float",
    "str",
    "list",
    "dict",
    "set",
    "tuple",
    "frozenset",
    "slice",
    "range",
    "zip",
    "len",
    "min",
    "max",
    "sum",
    "abs",
)
#: a longer path says nothing to anybody
_LONGEST_PATH = 120


class CannotTravel(SPError):
    """A value cannot cross. ``why`` is a clause about ``path``, the place where it lies."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path[:_LONGEST_PATH]} {why}")


@dataclass(frozen=True)
class Own:
    """Something that the workers have by themselves, by its place in the MODEL's options there: it stands for that here."""

    place: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SPError(f"{self.place} of the model runs in the workers only")


@dataclass(frozen=True)
class Packed:
    """``tree`` is what crosses; ``objects[i]`` is what entry i of its table stands for."""

    tree: dict[str, Any]
    objects: list[Any]


def to_wire(tree: Any) -> dict[str, Any]:
    """A tree as one text and what is no text in it, which the wire takes in one go instead of value by value."""
    values: list[Any] = []

    def place(value: Any) -> dict[str, int]:
        values.append(value)
        return {"value": len(values) - 1}

    return {"text": json.dumps(tree, default=place, separators=(",", ":")), "values": values}


def from_wire(body: dict[str, Any]) -> Any:
    """The tree that :func:`to_wire` was given."""
    values = body["values"]
    return json.loads(body["text"], object_hook=lambda node: values[node["value"]] if node.keys() == {"value"} else node)


def same(a: Any, b: Any) -> bool:
    """Two entries say the same."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        alike = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
        return alike and torch.equal(a, b.to(a.device))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def is_pythons_own(module: str) -> bool:
    """Something of a module of Python's that no patch of a model needs, such as files and processes."""
    root = module.split(".")[0]
    return root in sys.stdlib_module_names and root not in LIBRARIES


def by_name(module: ModuleType | None, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
