"""Makes objects of plain trees: see the package."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SPError
from .entries import BUILTINS, FIXED, Own, Packed, by_name, same
from .module_code import ModuleCode


@dataclass(frozen=True)
class World:
    """What an unpacked object is made of on this side."""

    code: ModuleCode
    #: a Python module by its name
    module: Callable[[str], ModuleType]
    #: a module of the model by its path
    part: Callable[[str], nn.Module]
    #: what this side has by itself, by its place
    own: Callable[[tuple[Any, ...]], Any] = field(default=lambda place: Own(place))


def unpack(tree: dict[str, Any], world: World, previous: Packed | None = None) -> tuple[Any, Packed]:
    """The value of :func:`pack`, and the objects it consists of. An object that ``previous`` has in the same place is the same object.

    Raises:
        SPError: this side has no such function, class or part of the model, or has other code by that name.
    """
    for name, variable, value in tree["globals"]:
        here = by_name(world.module(name), variable)
        if not same(here, value) and value == value:
            raise SPError(
                f"{variable} of {name.rsplit('/', 1)[-1]}, which a patch of the model reads, is {value!r} in ComfyUI's process and "
                f"{here!r} in the workers: a node or the patch has set it in one of them only. Place SP Model Patch after the node, "
                "or remove it"
            )
    maker = _Maker(tree["table"], world, [])
    if previous is not None:
        maker.take_over(previous)
    value = maker.item(tree["root"])
    maker.fill(range(len(tree["table"])))
    return value, Packed(tree, [maker.object(i) for i in range(len(tree["table"]))])


def absorb(objects: Sequence[Any], changed: list[list[Any]], world: World) -> None:
    """Bring ``objects`` to what :func:`changes` says of them."""
    size = max([len(objects), *(i + 1 for i, _ in changed)])
    table: list[Any] = [None] * size
    for i, entry in changed:
        table[i] = entry
    maker = _Maker(table, world, [*objects, *[_UNMADE] * (size - len(objects))])
    maker.fill([i for i, _ in changed])


_UNMADE: Any = object()


class _Maker:
    """Makes objects empty first and fills them then, as they may hold one another."""

    def __init__(self, table: list[Any], world: World, objects: list[Any]) -> None:
        self._table, self._world = table, world
        self._objects = objects or [_UNMADE] * len(table)
        self._made_here: set[int] = set()

    def take_over(self, previous: Packed) -> None:
        """Use the objects of another tree again where they are of the same kind; :meth:`fill` brings them to what this tree says."""
        pairs = list(zip(self._table, previous.tree["table"], strict=False))
        # code may have changed a tensor, so it comes anew
        again = {i for i, (now, before) in enumerate(pairs) if now[0] != "tensor" and same(_identity(now), _identity(before))}
        while leaving := {i for i in again if not again.issuperset(_refs(_identity(self._table[i])))}:
            again -= leaving
        for i in again:
            self._objects[i] = previous.objects[i]

    def object(self, index: int) -> Any:
        if self._objects[index] is _UNMADE:
            self._objects[index] = self._made(self._table[index])
            self._made_here.add(index)
        return self._objects[index]

    def item(self, item: Any) -> Any:
        if not isinstance(item, list):
            return item
        word = item[0]
        if word == "ref":
            return self.object(item[1])
        if word in ("tuple", "frozenset"):
            return (tuple if word == "tuple" else frozenset)(self.item(x) for x in item[1])
        if word == "cpu":
            return torch.device("cpu")
        if word == "size":
            return torch.Size(item[1])
        return item[1]

    def _made(self, entry: list[Any]) -> Any:
        kind, world = entry[0], self._world
        if kind in ("list", "dict", "set"):
            return {"list": list, "dict": dict, "set": set}[kind]()
        if kind == "tensor":
            # what came may be kept for later forwards, so code gets a copy to change
            return entry[1].cpu() if entry[2] and entry[1].device.type != "cpu" else entry[1].clone()
        if kind == "cell":
            return CellType()
        if kind == "module":
            return world.part(entry[1])
        if kind == "python":
            return world.module(entry[1])
        if kind == "own":
            return world.own(tuple(self.item(x) for x in entry[1]))
        if kind == "method":
            return MethodType(self.item(entry[1]), self.item(entry[2]))
        if kind == "partial":
            return functools.partial(self.item(entry[1]), *map(self.item, entry[2]), **{name: self.item(x) for name, x in entry[3]})
        return {"name": self._named, "object": self._instance, "function": self._function}[kind](entry)

    def _named(self, entry: list[Any]) -> Any:
        _, module, name, member, digest = entry
        found = getattr(builtins, name) if module == "builtins" and name in BUILTINS else by_name(self._world.module(module), name)
        if member and found is not None:
            return found[member]
        code = self._world.code
        here = (
            code.class_digest(found) if isinstance(found, type) else code.digest(found.__code__) if isinstance(found, FunctionType) else ""
        )
        if found is None or digest != here:
            raise _other_code(module, name)
        return found

    def _instance(self, entry: list[Any]) -> Any:
        module, name, digest = entry[1]
        return object.__new__(self._named(["name", module, name, "", digest]))

    def _function(self, entry: list[Any]) -> Any:
        module_name, digest, name, qualified, said_module = entry[1]
        module = self._world.module(module_name)
        code = self._world.code.find(module, digest)
        if code is None:
            raise _other_code(module_name, qualified)
        made = FunctionType(code, vars(module), name, None, tuple(self.item(cell) for cell in entry[2]))
        made.__qualname__, made.__module__ = qualified, said_module
        return made

    def fill(self, indices: Sequence[int]) -> None:
        for index in indices:
            value, entry = self.object(index), self._table[index]
            if entry[0] == "list":
                value[:] = [self.item(x) for x in entry[1]]
            elif entry[0] in ("dict", "set"):
                parts = [(self.item(key), self.item(x)) for key, x in entry[1]] if entry[0] == "dict" else [self.item(x) for x in entry[1]]
                value.clear()
                value.update(parts)
            elif entry[0] == "cell":
                self._fill_cell(value, entry)
            elif entry[0] == "tensor" and index not in self._made_here:
                _fill_tensor(value, entry[1])
            elif entry[0] == "object":
                self._fill_instance(value, entry)
            elif entry[0] == "function":
                value.__defaults__ = self.item(entry[3])
                value.__kwdefaults__ = {name: self.item(x) for name, x in entry[4]} or None
                self._fill_names(vars(value), entry[5])

    def _fill_cell(self, cell: CellType, entry: list[Any]) -> None:
        if len(entry) > 1:
            cell.cell_contents = self.item(entry[1])
        else:
            del cell.cell_contents

    def _fill_instance(self, value: Any, entry: list[Any]) -> None:
        if hasattr(value, "__dict__"):
            self._fill_names(vars(value), entry[2])
        for name, x in entry[3]:
            object.__setattr__(value, name, self.item(x))

    def _fill_names(self, where: dict[str, Any], names: list[list[Any]]) -> None:
        values = {name: self.item(x) for name, x in names}
        where.clear()
        where.update(values)


def _identity(entry: list[Any]) -> list[Any]:
    """The part of an entry that cannot be changed in an object that exists: its class, its code, its cells."""
    fixed = {"object": 2, "function": 3}.get(entry[0], len(entry) if entry[0] in FIXED else 1)
    return entry[:fixed]


def _refs(item: Any) -> Iterator[int]:
    if isinstance(item, list):
        if len(item) == 2 and item[0] == "ref":
            yield item[1]
        else:
            for part in item:
                yield from _refs(part)


def _fill_tensor(value: Tensor, source: Tensor) -> None:
    if value.shape != source.shape or value.dtype != source.dtype:
        raise SPError("a patch inside the model gave a tensor that it keeps another shape, which cannot be told back. Remove its node")
    value.copy_(source)


def _other_code(module: str, name: str) -> SPError:
    return SPError(
        f"{name} of {module.rsplit('/', 1)[-1]} is not in the workers as it is in ComfyUI's process. Restart ComfyUI if its pack was "
        "changed meanwhile; else remove its node, or place SP Model Patch after it"
    )
