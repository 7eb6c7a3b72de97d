"""Objects that come with a forward, in a worker: where they are put, and what is left of them afterwards."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sp_core.host.options import LATE_FORWARDS
from sp_core.host.travel import ModuleCode, Own, pack
from sp_core.host.worker.arrival import Arrivals, late_forwards, own_object
from sp_core.host.worker.forward_call import ForwardCall
from sp_core.planner.degrees import NOTHING_REQUESTED


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count


def own_patch(args: Any) -> Any:
    return args


def held() -> Any:
    model = nn.Sequential(nn.Linear(2, 2))
    options = {"patches": {"double_block": [own_patch]}, "state": "the workers' own"}
    patcher = SimpleNamespace(model=SimpleNamespace(diffusion_model=model), model_options={"transformer_options": options})
    return SimpleNamespace(patcher=patcher, diffusion_model=model, modules=dict(model.named_modules()))


def call() -> ForwardCall:
    return ForwardCall("forward", {"x": torch.zeros(1)}, {}, {"plain": 1}, NOTHING_REQUESTED)


def tree(value: dict[str, Any]) -> dict[str, Any]:
    return pack(value, "it", lambda module: None, ModuleCode()).tree


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals(lambda name: sys.modules[name])


def test_a_call_without_objects_is_as_it_came(arrivals: Arrivals) -> None:
    given = call()
    assert arrivals.complete(given, None, held()) is given and arrivals.changed() == []


def test_objects_stand_among_the_options(arrivals: Arrivals) -> None:
    complete = arrivals.complete(call(), tree({"state": Counter(3), "own": [Own(("patches", "double_block", 0))]}), held())
    assert complete.options["plain"] == 1 and complete.options["state"].count == 3 and complete.options["own"] == [own_patch]


def test_what_a_forward_changed(arrivals: Arrivals) -> None:
    complete = arrivals.complete(call(), tree({"state": Counter()}), held())
    assert arrivals.changed() == []
    complete.options["state"].count += 1
    [[_, entry]] = arrivals.changed()
    assert ["count", 1] in entry[2]


def test_objects_are_the_same_within_a_run_only(arrivals: Arrivals) -> None:
    model = held()
    states = []
    for _ in range(2):
        for count in (1, 2):
            states.append(arrivals.complete(call(), tree({"state": Counter(count)}), model).options["state"])
        arrivals.forget()
    assert states[0] is states[1] and states[2] is states[3] and states[0] is not states[2]
    assert arrivals.complete(call(), tree({"state": Counter()}), held()).options["state"] is not states[3], "of another model"


def test_what_the_workers_have(arrivals: Arrivals) -> None:
    patcher = held().patcher
    assert own_object(patcher, ("patches", "double_block", 0)) is own_patch
    assert own_object(patcher, ("option", "state")) == "the workers' own"


@pytest.mark.parametrize("patched", [False, True])
def test_late_forwards_are_there_for_one_forward(patched: bool) -> None:
    """A patch of a node before SP Model Patch is back afterwards."""
    model = nn.Sequential(nn.Linear(2, 2))
    if patched:
        model[0].forward = own_patch
    before = dict(vars(model[0]))

    def late(x: Any) -> str:
        return "late"

    with late_forwards(model, {LATE_FORWARDS: {"diffusion_model.0.forward": late}}):
        assert model(torch.zeros(1)) == "late"
    assert vars(model[0]) == before
