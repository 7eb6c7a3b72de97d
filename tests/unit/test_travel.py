"""Objects cross to the workers as plain data: made anew there from the same file, and told back."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sp_core.errors import SPError
from sp_core.host.travel import CannotTravel, ModuleCode, Own, Packed, World, absorb, changes, from_wire, pack, to_wire, unpack
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


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    path = tmp_path / "pack.py"
    path.write_text(SOURCE)
    processes = Processes(path)
    monkeypatch.setitem(sys.modules, NAME, processes.here)
    return processes


DATA = [
    1,
    2.5,
    "text",
    None,
    True,
    (1, (2, 3)),
    {"a": [1, {2}]},
    [frozenset({1, 2})],
    torch.Size([2, 3]),
    torch.float16,
    torch.device("cpu"),
]


@pytest.mark.parametrize("value", DATA, ids=str)
def test_data(two: Processes, value: Any) -> None:
    made = two.send(value)
    assert made == value and type(made) is type(value)


def test_tensors(two: Processes) -> None:
    tensor = torch.randn(3, 4)
    made = two.send({"a": tensor, "b": tensor})
    assert torch.equal(made["a"], tensor) and made["a"] is made["b"] and made["a"] is not tensor


def test_functions_and_classes_by_their_names(two: Processes) -> None:
    assert two.send(two.here.plain) is two.there.plain
    assert two.send(two.here.Wrapper) is two.there.Wrapper
    assert two.send(two.here.Mode.OFF) is two.there.Mode.OFF
    assert two.send(torch.nn.functional.relu) is torch.nn.functional.relu
    assert two.send(max) is max and type(two.send(object())) is object
    assert two.send({"module": torch.nn})["module"] is torch.nn


def test_a_switch_that_two_wrappers_share(two: Processes) -> None:
    switch = two.here.Switch(True, [1, 2])
    a, b = two.send([two.here.Wrapper(switch, two.model[1]), two.here.Wrapper(switch, two.model)])
    assert type(a) is two.there.Wrapper and a.switch is b.switch and a.switch.on and a.switch.layers == [1, 2]
    assert a.block is two.workers_model[1] and b.block is two.workers_model


def test_state_is_sent_anew_into_the_same_object(two: Processes) -> None:
    switch = two.here.Switch()
    wrapper = two.here.Wrapper(switch)
    first = two.send([wrapper, wrapper.double])
    switch.on, switch.layers = True, [5]
    second = two.send([wrapper, wrapper.double])
    assert first[0] is second[0] and second[0].switch.on and second[0].switch.layers == [5] and second[0](1) == 2


def test_another_object_in_the_same_place_is_another_object(two: Processes) -> None:
    first = two.send([two.here.Switch(), two.here.plain])[0]
    second = two.send([two.here.Wrapper(None).double, two.here.Switch(True)])
    assert second[0](4) == 8 and second[1].on and not first.on


def test_methods_partials_slots(two: Processes) -> None:
    import functools

    wrapper = two.here.Wrapper(two.here.Switch())
    made = two.send(
        {"method": wrapper.double, "partial": functools.partial(two.here.plain, 4), "slots": two.here.Slotted([1]), "w": wrapper}
    )
    assert made["method"](3) == 6 and made["method"].__self__ is made["w"]
    assert made["partial"]() == 5 and made["slots"].value == [1]


def test_a_method_of_a_module_of_the_model(two: Processes) -> None:
    made = two.send(two.model[0].forward)
    assert made.__self__ is two.workers_model[0]


def test_objects_that_hold_one_another(two: Processes) -> None:
    a, b = two.here.Switch(), two.here.Switch()
    a.layers, b.layers = [b], {"back": a}
    made = two.send(a)
    assert made.layers[0].layers["back"] is made


# -- functions that functions made ------------------------------------------------------------


def test_closures(two: Processes) -> None:
    add = two.send(two.here.counting(5))
    assert add("x") == 8 and add("x", by=1) == 9
    assert add.__globals__ is vars(two.there) and add.__qualname__ == "counting.<locals>.add"


def test_each_lambda_of_a_line(two: Processes) -> None:
    plus, minus = two.send(list(two.here.two_lambdas(3)))
    assert plus(10) == 13 and minus(10) == 7


@pytest.mark.parametrize(("make", "given", "expected"), [("decorated", 3, 18), ("recursive", 4, 12)])
def test_decorated_and_recursive_functions(two: Processes, make: str, given: int, expected: int) -> None:
    assert two.send(getattr(two.here, make)(given))(3) == expected


def test_a_function_that_bears_the_name_of_the_one_it_wraps(two: Processes) -> None:
    assert two.send(two.here.wrapping(two.here.plain))(1) == 20
    assert two.send(two.here.deep(7)[0])() == 7


def test_a_file_that_changed_meanwhile(two: Processes) -> None:
    function, wrapper = two.here.counting(1), two.here.Wrapper(None)
    two.path.write_text(SOURCE.replace("count += by", "count += by + 1").replace("return x * 2", "return x * 3"))
    with pytest.raises(CannotTravel, match=r"counting.<locals>.add.*file of its module"):
        two.send(function)
    two.there = loaded(two.path)
    with pytest.raises(SPError, match=r"Wrapper of sp_travelling_pack.*Restart ComfyUI"):
        two.send(wrapper)


def test_a_global_that_a_node_set_here_only(two: Processes) -> None:
    two.send(two.here.with_strength)
    two.here.STRENGTH = 0.5
    with pytest.raises(SPError, match=r"STRENGTH of sp_travelling_pack, .* is 0.5"):
        two.send(two.here.with_strength)


def test_what_a_class_has_and_a_node_set_here_only(two: Processes) -> None:
    assert two.send(two.here.Tuned())(2) == 4
    two.here.Tuned.amount = 3
    with pytest.raises(SPError, match=r"Tuned.amount of sp_travelling_pack, .* is 3 in ComfyUI's process and 2"):
        two.send(two.here.Tuned())


# -- what cannot cross --------------------------------------------------------------------------

CANNOT = [
    (lambda m: m.Locked(), r"it\.lock is a lock of _thread, which is neither data"),
    (lambda m: m.Ends(), "an Ends"),
    (lambda m: m.deep(1)[1], "Local.*a class that cannot be found by its name"),
    (lambda m: {"a": m.Other()}, "it.a is a module that is no part of the model"),
    (lambda m: open(__file__), "TextIOWrapper"),  # noqa: SIM115
    (lambda m: os.system, "Python's posix"),
    (lambda m: {"os": os}, "the Python module os"),
    (lambda m: eval, "eval of Python's builtins"),
    (lambda m: re.compile("x"), "Pattern"),
    (lambda m: (x for x in ()), "generator"),
    (lambda m: torch.Generator(), "Generator"),
    (lambda m: nn.Parameter(torch.ones(2)), "Parameter"),
    (lambda m: eval("lambda: 1", vars(m)), "lambda.*not in the file"),
]


@pytest.mark.parametrize(("make", "words"), CANNOT, ids=[words[:20] for _, words in CANNOT])
def test_what_cannot_cross_says_why(two: Processes, make: Any, words: str) -> None:
    with pytest.raises(CannotTravel, match=words):
        two.send(make(two.here))


# -- what the workers have by themselves ----------------------------------------------------------


def test_an_own_patch_of_the_workers_that_another_function_holds(two: Processes) -> None:
    place = ("patches", "double_block", 0)
    made = two.send([Own(place), two.here.Switch(layers=[Own(place)])])
    assert made[0] is two.own[place] and made[1].layers == [two.own[place]]


# -- and back -------------------------------------------------------------------------------------


def test_nothing_is_told_back_where_nothing_changed(two: Processes) -> None:
    two.send([two.here.Switch(True, [1]), torch.ones(3), two.here.counting(2), two.model[0], two.here.plain, {1: (2, [3])}])
    assert two.tell_back() == 0


def test_what_changed_is_told_back(two: Processes) -> None:
    wrapper, add, tensor = two.here.Wrapper(two.here.Switch()), two.here.counting(2), torch.ones(3)
    sent = {"wrapper": wrapper, "add": add, "tensor": tensor, "list": [1]}
    made = two.send(sent)
    made["wrapper"](1), made["add"]("seen"), made["tensor"].mul_(2)
    made["list"].append(two.there.Switch(True, [made["wrapper"]]))
    two.tell_back()
    assert wrapper.calls == 1 and tensor.tolist() == [2, 2, 2]
    assert add("again") == 8 and add.__closure__[1].cell_contents == ["seen", "again"]
    assert type(sent["list"][1]) is two.here.Switch and sent["list"][1].layers[0] is wrapper
    # and the next forward goes on from there
    again = two.send(sent)
    assert again["wrapper"].calls == 1 and again["wrapper"] is made["wrapper"]


def test_a_tensor_that_code_keeps_is_told_back(two: Processes) -> None:
    switch = two.here.Switch()
    two.send(switch).layers.append(torch.arange(4))
    two.tell_back()
    assert switch.layers[0].tolist() == [0, 1, 2, 3]


def test_what_arrived_is_never_what_is_kept_for_later(two: Processes) -> None:
    """A tensor that the workers hold already is not sent again, so code must not change that one."""
    tensor = torch.ones(3)
    packed = pack(tensor, "it", two.path_of, two.code)
    value, _ = unpack(packed.tree, two.world())
    value.mul_(3)
    assert tensor.tolist() == [1, 1, 1]


def test_what_is_kept_and_cannot_cross_back(two: Processes) -> None:
    two.send(two.here.Switch()).layers.append(two.there.Locked())
    with pytest.raises(CannotTravel, match="lock"):
        two.tell_back()
