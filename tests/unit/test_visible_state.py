"""What a function can see of Python, and that a change of any of it is noticed."""

from __future__ import annotations

import functools
import itertools
import random
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sp_core.plans.probing.random_state import RandomState
from sp_core.plans.probing.visible_state import Hidden, VisibleState

number = 1
table = {"strength": [1.0, 2.0]}
helpers = types.ModuleType("helpers_of_a_pack")
helpers.step = 0  # type: ignore[attr-defined]


class Settings:
    kind = "plain"

    def __init__(self) -> None:
        self.strength, self.inner = 1.0, {"blocks": [1, 2]}

    def scale(self, x: Any) -> Any:
        return x * self.strength * number


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.enabled = nn.Linear(2, 2), True

    def forward(self, x: Any) -> Any:
        return self.linear(x) if self.enabled else x


def with_closure() -> tuple[Callable[..., Any], Callable[[], None]]:
    count = 0

    def function(x: Any) -> Any:
        return x * count

    def change() -> None:
        nonlocal count
        count += 1

    return function, change


def with_list() -> tuple[Callable[..., Any], Callable[[], None]]:
    calls: list[int] = []
    return lambda x: x * len(calls), lambda: calls.append(1)


def with_object() -> tuple[Callable[..., Any], Callable[[], None]]:
    settings = Settings()
    return lambda x: settings.scale(x), lambda: setattr(settings, "strength", 2.0)


def with_inner_state() -> tuple[Callable[..., Any], Callable[[], None]]:
    settings = Settings()
    return settings.scale, lambda: settings.inner["blocks"].append(3)


def with_new_attribute() -> tuple[Callable[..., Any], Callable[[], None]]:
    settings = Settings()
    return settings.scale, lambda: setattr(settings, "cache", torch.zeros(1))


def with_class_attribute() -> tuple[Callable[..., Any], Callable[[], None]]:
    return Settings().scale, lambda: setattr(Settings, "kind", Settings.kind + "er")


def with_global() -> tuple[Callable[..., Any], Callable[[], None]]:
    return lambda x: x * number, lambda: globals().update(number=number + 1)


def with_table() -> tuple[Callable[..., Any], Callable[[], None]]:
    return lambda x: x * table["strength"][0], lambda: table["strength"].append(1.0)


def with_module_of_the_pack() -> tuple[Callable[..., Any], Callable[[], None]]:
    return lambda x: x * helpers.step, lambda: setattr(helpers, "step", helpers.step + 1)  # type: ignore[attr-defined]


def with_function_attribute() -> tuple[Callable[..., Any], Callable[[], None]]:
    def function(x: Any) -> Any:
        return x

    return function, lambda: setattr(function, "calls", 1)


def with_helper() -> tuple[Callable[..., Any], Callable[[], None]]:
    inner, change = with_closure()
    return functools.partial(lambda other, x: other(x), inner), change


def with_tensor() -> tuple[Callable[..., Any], Callable[[], None]]:
    weight = torch.ones(2)
    return lambda x: x * weight, lambda: weight.__setitem__(0, 5.0)


def with_inference_tensor() -> tuple[Callable[..., Any], Callable[[], None]]:
    with torch.inference_mode():
        weight = torch.ones(2)

    def change() -> None:
        with torch.inference_mode():
            weight[1] = 5

    return lambda x: x * weight, change


def with_layer() -> tuple[Callable[..., Any], Callable[[], None]]:
    layer = Layer()
    return layer.forward, lambda: setattr(layer, "enabled", False)


def with_weights() -> tuple[Callable[..., Any], Callable[[], None]]:
    layer = Layer()
    return types.MethodType(lambda self, x: self.linear(x), layer), lambda: setattr(layer, "enabled", False)


SEEN = [
    with_closure,
    with_list,
    with_object,
    with_inner_state,
    with_new_attribute,
    with_class_attribute,
    with_global,
    with_table,
    with_module_of_the_pack,
    with_function_attribute,
    with_helper,
    with_tensor,
    with_inference_tensor,
    with_layer,
    with_weights,
]


@pytest.mark.parametrize("make", SEEN)
def test_a_change_is_noticed(make: Callable[[], tuple[Callable[..., Any], Callable[[], None]]]) -> None:
    function, change = make()
    state = VisibleState([function])
    assert not state.changed()
    change()
    assert state.changed()


def reads_the_clock(x: Any) -> Any:
    return x * time.time()


def reads_a_file(x: Any) -> Any:
    with open("/tmp/strength") as file:
        return x * float(file.read())


def imports(x: Any) -> Any:
    import os

    return x * len(os.environ)


def draws(x: Any) -> Any:
    return x * random.random()


STEPS = itertools.count()
HIDDEN = {
    "the clock": reads_the_clock,
    "a file": reads_a_file,
    "an import": imports,
    "chance": draws,
    "an iterator": lambda x: x * next(STEPS),
    "a generator": functools.partial(lambda steps, x: x * next(steps), (i for i in range(3))),
    "a generator of torch": functools.partial(lambda generator, x: x, torch.Generator()),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_cannot_be_compared_is_said(name: str) -> None:
    with pytest.raises(Hidden):
        VisibleState([HIDDEN[name]])


def draw_from_torch() -> None:
    torch.rand(1)


def draw_from_python() -> None:
    random.random()


def draw_from_numpy() -> None:
    import numpy

    numpy.random.rand()


@pytest.mark.parametrize("draw", [draw_from_torch, draw_from_python, draw_from_numpy])
def test_a_draw_is_noticed_and_taken_back(draw: Callable[[], None]) -> None:
    draw()  # numpy is imported
    before = RandomState(torch.device("cpu"))
    assert not before.changed()
    draw()
    assert before.changed()
    before.restore()
    assert not before.changed()
