"""Makes plain trees of objects: see the package."""

from __future__ import annotations

import enum
import functools
import sys
import uuid
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...pool.wire import unsendable
from .entries import BUILTINS, FIXED, CannotTravel, Own, Packed, by_name, is_pythons_own, same
from .module_code import ModuleCode, methods_of, scalars_read

_SCALARS = (bool, int, float, str)
#: CPython's flags of a class: made by a class statement (HEAPTYPE); closed (DISALLOW_INSTANTIATION, IMMUTABLETYPE)
_MADE_BY_PYTHON, _FIXED_BY_C = 1 << 9, 1 << 7 | 1 << 8
#: instances of classes that are made of these hold more than their attributes
_MORE_THAN_STATE = (dict, list, tuple, set, frozenset, str, int, float, Tensor)
#: modules that say something of their process, such as what memory it has
_PROCESS = {"comfy", "torch", *sys.stdlib_module_names}


def pack(
    value: Any, label: str, path_of: Callable[[nn.Module], str | None], code: ModuleCode, own: Mapping[int, Own] | None = None
) -> Packed:
    """``value`` as a tree that crosses the wire.

    Args:
        label: what ``value`` is called in a refusal.
        path_of: path of a module below the model, "" for the model, or None.
        own: id of an object -> what it is in the workers.

    Raises:
        CannotTravel: says what cannot cross, and why.
    """
    packer = _Packer(path_of, code, own or {})
    root = packer.item(value, label)
    packer.describe_all()
    return Packed({"root": root, "table": packer.table, "globals": packer.globals()}, packer.objects)


def changes(packed: Packed, label: str, path_of: Callable[[nn.Module], str | None], code: ModuleCode) -> list[list[Any]]:
    """What of unpacked objects is not as it came: [index, entry] of each, and of new objects that these hold now.

    Args:
        packed: the tree as it came, and the objects that were made of it.

    Raises:
        CannotTravel: what an object holds now cannot cross.
    """
    before = packed.tree["table"]
    packer = _Packer(path_of, code, {})
    for entry, value in zip(before, packed.objects, strict=True):
        packer.add(value, label, entry if entry[0] in FIXED else None)
    packer.describe_all()
    after = packer.table
    return [[i, entry] for i, entry in enumerate(after) if i >= len(before) or not same(before[i], entry)]


class _Packer:
    def __init__(self, path_of: Callable[[nn.Module], str | None], code: ModuleCode, own: Mapping[int, Own]) -> None:
        self._path_of, self._code, self._own = path_of, code, own
        self.objects: list[Any] = []
        self.table: list[Any] = []
        self._index: dict[int, int] = {}
        self._waiting: list[tuple[int, str]] = []
        self._functions: list[FunctionType] = []
        self._kinds: dict[type, None] = {}

    def add(self, value: Any, path: str, entry: Any = None) -> int:
        self.objects.append(value)
        self.table.append(entry)
        index = self._index.setdefault(id(value), len(self.table) - 1)
        if entry is None:
            self._waiting.append((len(self.table) - 1, path))
        return index

    def describe_all(self) -> None:
        while self._waiting:
            index, path = self._waiting.pop()
            self.table[index] = self._described(self.objects[index], path)

    def globals(self) -> list[list[Any]]:
        """[module, name, value] of what the functions read of their packs' modules, and of what the classes of objects have."""
        read = scalars_read([function for function in self._functions if _root(function.__globals__.get("__name__")) not in _PROCESS])
        found = [[module, name, value] for module, names in read.items() for name, value in sorted(names.items())]
        for kind in self._kinds:
            names = [name for name, value in vars(kind).items() if type(value) in _SCALARS and not name.startswith("__")]
            found += [[kind.__module__, f"{kind.__qualname__}.{name}", vars(kind)[name]] for name in names]
        return found

    def item(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in _SCALARS:
            return value
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.item(x, f"{path}.{i}") for i, x in enumerate(value)]]
        if kind is torch.device:
            return ["cpu"] if value.type == "cpu" else ["plain", value]
        if kind is torch.Size:
            return ["size", list(value)]
        if kind in (torch.dtype, uuid.UUID) and unsendable(value) is None:
            return ["plain", value]
        if kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            return self.item(value.item(), path)
        return ["ref", self._index[id(value)] if id(value) in self._index else self.add(value, path)]

    def _described(self, value: Any, path: str) -> list[Any]:
        own = value if isinstance(value, Own) else self._own.get(id(value))
        if own is not None:
            return ["own", [self.item(x, path) for x in own.place]]
        if isinstance(value, nn.Module):
            return ["module", self._path(value, path)]
        describe = _DESCRIBE.get(type(value))
        if describe is not None:
            return describe(self, value, path)
        if isinstance(value, enum.Enum):
            return ["name", *self._name(type(value), path), value.name, ""]
        if isinstance(value, type):
            return ["name", *self._name(value, path), "", self._code.class_digest(value)]
        if hasattr(value, "__qualname__") and not hasattr(value, "__dict__") and callable(value):
            return ["name", *self._name(value, path), "", ""]
        return self._instance(value, path)

    def _path(self, module: nn.Module, path: str) -> str:
        found = self._path_of(module)
        if found is None:
            raise CannotTravel(path, f"is a module that is no part of the model ({type(module).__qualname__})")
        return found

    def _name(self, value: Any, path: str) -> tuple[str, str]:
        """(module, qualified name) by which the other side finds ``value``."""
        module, name = getattr(value, "__module__", None) or "", value.__qualname__
        if is_pythons_own(module) and (module != "builtins" or name not in BUILTINS):
            raise CannotTravel(path, f"is {name} of Python's {module}, which no patch of a model may bring")
        if by_name(sys.modules.get(module), name) is not value:
            raise CannotTravel(path, f"is {name} of {module.rsplit('/', 1)[-1]}, which cannot be found by that name")
        return module, name

    # -- by type -------------------------------------------------------------------------

    def _list(self, value: list[Any], path: str) -> list[Any]:
        return ["list", [self.item(x, f"{path}.{i}") for i, x in enumerate(value)]]

    def _set(self, value: set[Any], path: str) -> list[Any]:
        return ["set", [self.item(x, path) for x in sorted(value, key=repr)]]

    def _dict(self, value: dict[Any, Any], path: str) -> list[Any]:
        return ["dict", [[self.item(key, path), self.item(x, f"{path}.{key}")] for key, x in value.items()]]

    def _tensor(self, value: Tensor, path: str) -> list[Any]:
        if (problem := unsendable(value)) is not None or value.layout is not torch.strided:
            raise CannotTravel(path, f"is a tensor that does not cross the wire ({problem or value.layout})")
        return ["tensor", value.detach(), value.device.type == "cpu"]

    def _cell(self, value: CellType, path: str) -> list[Any]:
        try:
            return ["cell", self.item(value.cell_contents, path)]
        except ValueError:
            return ["cell"]

    def _method(self, value: MethodType, path: str) -> list[Any]:
        return ["method", self.item(value.__func__, path), self.item(value.__self__, f"{path}.__self__")]

    def _partial(self, value: functools.partial[Any], path: str) -> list[Any]:
        args = [self.item(x, f"{path}.{i}") for i, x in enumerate(value.args)]
        return [
            "partial",
            self.item(value.func, path),
            args,
            [[name, self.item(x, f"{path}.{name}")] for name, x in value.keywords.items()],
        ]

    def _python(self, value: ModuleType, path: str) -> list[Any]:
        if sys.modules.get(value.__name__) is not value or is_pythons_own(value.__name__):
            raise CannotTravel(
                path, f"is the Python module {value.__name__}, which cannot be found by that name or which no patch of a model may bring"
            )
        return ["python", value.__name__]

    def _function(self, value: FunctionType, path: str) -> list[Any]:
        """A function of a file by its name, or one that a function of that file made: its code is the file's, and it holds cells."""
        name = value.__globals__.get("__name__", "")
        module = sys.modules.get(name)
        digest = self._code.digest(value.__code__)
        self._functions.append(value)
        if is_pythons_own(name):
            raise CannotTravel(path, f"is {value.__qualname__} of Python's {name}, which no patch of a model may bring")
        if module is not None and value.__module__ == name and by_name(module, value.__qualname__) is value:
            return ["name", name, value.__qualname__, "", digest]
        if module is None or vars(module) is not value.__globals__ or self._code.find(module, digest) is None:
            raise CannotTravel(
                path, f"is the function {value.__qualname__}, whose code is not in the file of its module (changed since ComfyUI started?)"
            )
        names = [value.__name__, value.__qualname__, value.__module__]
        freevars = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        cells = [self.item(cell, f"{path}'s {name}") for name, cell in freevars]
        kwdefaults = [[name, self.item(x, f"{path}'s {name}")] for name, x in (value.__kwdefaults__ or {}).items()]
        attributes = [[name, self.item(x, f"{path}.{name}")] for name, x in vars(value).items()]
        return ["function", [name, digest, *names], cells, self.item(value.__defaults__, path), kwdefaults, attributes]

    def _instance(self, value: Any, path: str) -> list[Any]:
        kind = type(value)
        if _made_by_c(kind) or hasattr(kind, "__del__") or isinstance(value, _MORE_THAN_STATE):
            raise CannotTravel(path, f"is {_a(kind)}, which is neither data nor an object that consists of data")
        try:
            names = self._name(kind, path)
        except CannotTravel:
            raise CannotTravel(path, f"is {_a(kind)}, a class that cannot be found by its name") from None
        if kind not in self._kinds:
            self._functions += [function for base in kind.__mro__ for function in methods_of(base)]
            self._kinds |= dict.fromkeys(base for base in kind.__mro__ if _root(base.__module__) not in _PROCESS)
        state = [[name, self.item(x, f"{path}.{name}")] for name, x in vars(value).items()] if hasattr(value, "__dict__") else []
        slots = [[name, self.item(getattr(value, name), f"{path}.{name}")] for name in _slots(kind) if hasattr(value, name)]
        return ["object", [*names, self._code.class_digest(kind)], state, slots]


_DESCRIBE: dict[type, Callable[[_Packer, Any, str], list[Any]]] = {
    list: _Packer._list,
    set: _Packer._set,
    dict: _Packer._dict,
    Tensor: _Packer._tensor,
    CellType: _Packer._cell,
    MethodType: _Packer._method,
    functools.partial: _Packer._partial,
    ModuleType: _Packer._python,
    FunctionType: _Packer._function,
}


def _slots(kind: type) -> list[str]:
    names = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    flat = [name for found in names for name in ([found] if isinstance(found, str) else found)]
    return [name for name in flat if name not in ("__dict__", "__weakref__")]


def _made_by_c(kind: type) -> bool:
    """Instances hold more than Python sees: a lock, an open file, a stream."""
    made_by_python = kind.__new__ is object.__new__ or isinstance(kind.__new__, FunctionType)
    return not made_by_python or any(not base.__flags__ & _MADE_BY_PYTHON or base.__flags__ & _FIXED_BY_C for base in kind.__mro__[:-1])


def _a(kind: type) -> str:
    return f"{'an' if kind.__qualname__[:1] in 'AEIOUaeiou' else 'a'} {kind.__qualname__} of {kind.__module__.rsplit('/', 1)[-1]}"


def _root(module: str | None) -> str:
    """Name of the outermost package; a method that dataclasses made names no module."""
    return (module or "torch").split(".")[0]
