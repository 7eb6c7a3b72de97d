"""Objects cross to the workers as plain data and are made anew there from the same file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from unit.travelling import SOURCE, Processes, loaded, two_processes

from sp_core.errors import SPError
from sp_core.host.travel import CannotTravel, Own


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    return two_processes(tmp_path, monkeypatch)


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
