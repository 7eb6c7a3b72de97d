"""A pack whose objects travel, and two processes that have loaded it: ComfyUI's and a worker's, both in this one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sp_core.host.travel import ModuleCode, Packed, World, absorb, changes, from_wire, pack, to_wire, unpack
from sp_core.pool import wire

NAME = "/packs/sp_travelling_pack"
SOURCE = """
import enum
import functools
import threading
from dataclasses import dataclass, field

import torch
from torch import nn

STRENGTH = 1.0


def read_strength():
    return STRENGTH


class Mode(enum.Enum):
    ON = 1
    OFF = 2


@dataclass
class Switch:
    on: bool = False
    layers: list = field(default_factory=list)


class Tuned:
    amount = 2

    def __call__(self, x):
        return x * self.amount


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Wrapper:
    def __init__(self, switch, block=None):
        self.switch, self.block, self.calls = switch, block, 0

    def __call__(self, x):
        self.calls += 1
        return x * 2 if self.switch.on else x

    def double(self, x):
        return 2 * x


class Locked:
    def __init__(self):
        self.lock = threading.Lock()


class Ends:
    def __del__(self):
        pass


class Other(nn.Module):
    pass


def plain(x):
    return x + 1


def with_strength(x):
    return x * read_strength()


def counting(start, step=3):
    count = start
    seen = []

    def add(x, by=step):
        nonlocal count
        count += by
        seen.append(x)
        return count

    return add


def two_lambdas(k):
    return (lambda x: x + k), (lambda x: x - k)


def decorated(k):
    @torch.no_grad()
    def inner(x, *, scale=2):
        return x * k * scale

    return inner


def deep(k):
    class Local:
        pass

    def outer():
        def inner():
            return k
        return inner

    return outer(), Local()


def recursive(n):
    def down(x):
        return 0 if x == 0 else n + down(x - 1)
    return down


def wrapping(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return 10 * function(*args, **kwargs)
    return wrapped
"""


def loaded(path: Path) -> ModuleType:
    """A module as ComfyUI loads a pack: by its file, under a name that is its path."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Processes:
    """ComfyUI's process and a worker, each with its own copy of one pack and one model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.here, self.there = loaded(path), loaded(path)
        self.model, self.workers_model = (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())) for _ in range(2))
        self.own = {("patches", "double_block", 0): object()}
        self.code = ModuleCode()
        self.workers_code = ModuleCode()
        self.last: Packed | None = None

    def path_of(self, module: nn.Module) -> str | None:
        return next((path for path, found in self.model.named_modules() if found is module), None)

    def workers_path_of(self, module: nn.Module) -> str | None:
        return next((path for path, found in self.workers_model.named_modules() if found is module), None)

    def world(self) -> World:
        def module(name: str) -> ModuleType:
            return self.there if name == NAME else sys.modules[name]

        return World(self.workers_code, module, self.workers_model.get_submodule, lambda place: self.own[place])

    def send(self, value: Any) -> Any:
        """What the worker makes of ``value``."""
        self.packed = pack(value, "it", self.path_of, self.code)
        encoded = wire.encode(to_wire(self.packed.tree))
        tree = from_wire(wire.decode(encoded.tree, encoded.tensors, torch.device("cpu")))
        made, self.last = unpack(tree, self.world(), self.last)
        return made

    def tell_back(self) -> int:
        """What the objects are in the worker they become here. Returns how many entries crossed."""
        assert self.last is not None
        with mock.patch.dict(sys.modules, {NAME: self.there}):
            changed = changes(self.last, "it", self.workers_path_of, self.workers_code)
        here = World(self.code, lambda name: sys.modules[name], self.model.get_submodule)
        absorb(self.packed.objects, changed, here)
        return len(changed)


def two_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    """Both, with the pack in ``folder``; ComfyUI's process is the one whose modules this process has."""
    path = folder / "pack.py"
    path.write_text(SOURCE)
    processes = Processes(path)
    monkeypatch.setitem(sys.modules, NAME, processes.here)
    return processes
