"""What a function can see of Python: whether any of it changed is told by looking again.

A function that sees the same Python as before, and reads no value of a tensor into Python, takes the same way through its code.
So what was once shown of the way holds for every later call. What cannot be looked into is an error here, never trusted.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import pathlib
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: values that cannot change: two of them are compared by value
PLAIN = (
    *(type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes, slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, re.Pattern, enum.Enum, pathlib.PurePath),
)
#: packages whose functions keep no state between the steps of a sampling run
_STATELESS = {
    "torch",
    "comfy",
    "einops",
    "math",
    "functools",
    "typing",
    "collections",
    "operator",
    "types",
    "logging",
    "sp_core",
    "builtins",
}
#: packages whose objects are looked at by identity: what the host and torch keep does not change with the steps of a run
_BY_IDENTITY = {"torch", "comfy", "einops", "logging", "sp_core"}
#: these look at what no snapshot holds
_SIGHTS = {"open", "eval", "exec", "compile", "globals", "locals", "input", "__import__", "id"}
#: an object with more parts than this is not looked through
_MOST_PARTS = 5000
#: tensors without a version, made under inference mode, are compared by value up to this many elements
_MOST_ELEMENTS = 1 << 20
_GONE = object()
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType)


class Hidden(Exception):
    """A function can see something whose changes nobody could notice."""


def is_plain(value: Any) -> bool:
    """Plain values, and tuples, lists and dicts of them."""
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value.values()))
    return isinstance(value, PLAIN)


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)


def _package(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


class VisibleState:
    """All that some functions can see of Python at this moment: closures, attributes, globals that their code names.

    Raises:
        Hidden: one of them sees something that cannot be compared later.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._unchanged: list[Callable[[], bool]] = []
        # kept alive, so that an id stays its own
        self._known: dict[int, Any] = {}
        for root in roots:
            self._visit(root)

    def changed(self) -> bool:
        """Something of it is not as it was."""
        return not all(unchanged() for unchanged in self._unchanged)

    # -- what is looked at ---------------------------------------------------------------

    def _visit(self, value: Any) -> None:
        if isinstance(value, (*PLAIN, *_DESCRIPTORS, types.ModuleType)) or id(value) in self._known:
            return
        self._known[id(value)] = value
        if len(self._known) > _MOST_PARTS:
            raise Hidden("it sees more objects than can be compared")
        kinds: tuple[tuple[Any, Callable[[Any], None]], ...] = (
            (Tensor, self._visit_tensor),
            (nn.Module, self._visit_module),
            (type, self._visit_class),
            (types.FunctionType, self._visit_function),
            ((types.MethodType, functools.partial), self._visit_bound),
            ((types.BuiltinFunctionType, types.MethodWrapperType), self._visit_builtin),
            ((staticmethod, classmethod), lambda found: self._visit(found.__func__)),
            (property, lambda found: self._visit(found.fget)),
            (dict, lambda found: self._hold_mapping(found, found.values())),
            ((list, tuple, set, frozenset, deque), self._visit_items),
        )
        visit = next((visit for kind, visit in kinds if isinstance(value, kind)), self._visit_instance)
        visit(value)

    def _hold_mapping(self, mapping: Mapping[Any, Any], values: Iterable[Any], skip: Callable[[Any, Any], bool] | None = None) -> None:
        def now() -> dict[Any, Any]:
            return dict(mapping) if skip is None else {key: value for key, value in mapping.items() if not skip(key, value)}

        was = now()

        def unchanged() -> bool:
            is_now = now()
            return len(is_now) == len(was) and all(_same(value, is_now.get(key, _GONE)) for key, value in was.items())

        self._unchanged.append(unchanged)
        for value in values:
            self._visit(value)

    def _hold_name(self, mapping: Mapping[str, Any], name: str) -> None:
        was = mapping[name]
        self._unchanged.append(lambda: _same(was, mapping.get(name, _GONE)))
        self._visit(was)

    def _visit_items(self, items: Any) -> None:
        if isinstance(items, (set, frozenset)):
            was: Any = set(items)
            self._unchanged.append(lambda: items == was)
        elif not isinstance(items, tuple):
            was = list(items)
            self._unchanged.append(lambda: len(items) == len(was) and all(map(_same, items, was)))
        for item in items:
            self._visit(item)

    def _visit_tensor(self, tensor: Tensor) -> None:
        if not tensor.is_inference():
            was = tensor._version
            self._unchanged.append(lambda: tensor._version == was)
        elif tensor.device.type == "cpu" and tensor.numel() <= _MOST_ELEMENTS:
            copy = tensor.clone()
            self._unchanged.append(lambda: torch.equal(tensor, copy))
        else:
            raise Hidden("it sees a tensor that cannot be compared")

    def _visit_module(self, module: nn.Module) -> None:
        # a patch of a forward, and our own hooks, lie in the module itself
        own = {"forward"}
        self._hold_mapping(
            vars(module),
            [value for key, value in vars(module).items() if not key.startswith("_") and key not in own],
            lambda key, value: key.startswith("_") or key in own or _package(value) == "sp_core",
        )
        if _package(type(module)) not in _BY_IDENTITY:
            self._visit_class(type(module))
            for part in (*module._parameters.values(), *module._buffers.values(), *module._modules.values()):
                self._visit(part)

    def _visit_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if _package(base) not in _STATELESS:
                values = [value for key, value in vars(base).items() if key not in ("__dict__", "__weakref__", "__module__", "__doc__")]
                self._hold_mapping(vars(base), values)

    def _visit_bound(self, bound: Any) -> None:
        if isinstance(bound, types.MethodType):
            self._visit(bound.__func__)
            self._visit(bound.__self__)
        else:
            for part in (bound.func, bound.args, bound.keywords):
                self._visit(part)

    def _visit_builtin(self, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._visit(owner)
        elif (package := _package(function)) not in _STATELESS and package not in ("", "_operator"):
            raise Hidden(f"it calls {function.__name__} of {package}")

    def _visit_instance(self, thing: Any) -> None:
        kind = type(thing)
        if isinstance(thing, torch.Generator):
            raise Hidden("it holds a generator of random numbers")
        if _package(kind) in _BY_IDENTITY:
            return
        slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
        if _package(kind) == "builtins" or slots or not hasattr(thing, "__dict__"):
            raise Hidden(f"it holds a {kind.__name__}, which cannot be compared")
        self._visit_class(kind)
        self._hold_mapping(vars(thing), vars(thing).values())

    # -- functions -----------------------------------------------------------------------

    def _visit_function(self, function: types.FunctionType) -> None:
        if _package(function) in _STATELESS:
            return
        self._hold_mapping(vars(function), vars(function).values())
        for value in (function.__defaults__, function.__kwdefaults__):
            self._visit(value)
        for cell in function.__closure__ or ():
            self._hold_cell(cell)
        names = _Names(function.__code__)
        for name in names.imported:
            if name.partition(".")[0] not in _STATELESS:
                raise Hidden(f"it imports {name}")
        for name in names.globals:
            if name in function.__globals__:
                self._hold_name(function.__globals__, name)
                self._visit_parts(function.__globals__[name], names.attributes, set())
            elif name in _SIGHTS and hasattr(builtins, name):
                raise Hidden(f"it calls {name}")

    def _hold_cell(self, cell: Any) -> None:
        try:
            was = cell.cell_contents
        except ValueError:
            raise Hidden("it sees a variable that has no value yet") from None
        self._unchanged.append(lambda: _same(was, cell.cell_contents))
        self._visit(was)

    def _visit_parts(self, module: Any, attributes: set[str], seen: set[int]) -> None:
        """Of a Python module, what the code that names it may mean."""
        if not isinstance(module, types.ModuleType) or id(module) in seen:
            return
        seen.add(id(module))
        package = module.__name__.partition(".")[0]
        if package in _STATELESS:
            return
        if package in sys.stdlib_module_names or package == "numpy":
            raise Hidden(f"it uses {package}")
        for name in sorted(attributes & vars(module).keys()):
            self._hold_name(vars(module), name)
            self._visit_parts(vars(module)[name], attributes, seen)


class _Names:
    """Names in a function's code, and in the functions that are made in it."""

    def __init__(self, code: types.CodeType) -> None:
        self.globals: set[str] = set()
        self.attributes: set[str] = set()
        self.imported: set[str] = set()
        self._read(code)

    def _read(self, code: types.CodeType) -> None:
        for instruction in dis.get_instructions(code):
            if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
                self.globals.add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                self.imported.add(instruction.argval or ".")
            elif "ATTR" in instruction.opname or "METHOD" in instruction.opname:
                self.attributes.add(instruction.argval)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._read(constant)
