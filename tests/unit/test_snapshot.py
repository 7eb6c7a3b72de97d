"""A part of the model that is swapped while it is sampled is noticed; what ComfyUI applies and takes back is not."""

from __future__ import annotations

import types
import unittest.mock
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sp_core.errors import SPError
from sp_core.host.ui.snapshot import Snapshot
from sp_core.host.ui.watch import SwapWatch

HALVES = 2


def attend(x: Any, *_: Any) -> Any:
    return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.conv = nn.Conv2d(2, 2, 3)
        self.function = attend
        self.num_heads = 3
        self.axes = [1, 2]
        self.drop = nn.Dropout()
        self.calls, self.seen = 0, {}

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.seen["last"] = x
        return attend(x, self.num_heads, self.axes, HALVES)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward_orig(self, x: Any) -> Any:
        return x


def other(*args: Any) -> Any:
    return args


class Uncomparable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("which of the two?")

    __hash__ = None  # type: ignore[assignment]


def set_heads(block: Any, heads: int) -> None:
    # not by an assignment: what functions of the model's file assign is its state
    setattr(block, "num_heads", heads)  # noqa: B010


def remove_block(model: Any) -> None:
    del model.blocks[1]


SWAPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "method": (lambda m: setattr(m, "forward_orig", other), "forward_orig"),
    "bound method": (lambda m: setattr(m, "forward_orig", types.MethodType(other, m)), "forward_orig"),
    "another module's method": (lambda m: setattr(m.blocks[0], "forward", m.blocks[1].forward), "blocks.0.forward"),
    "children": (lambda m: setattr(m, "blocks", nn.ModuleList([m.blocks[0]])), "blocks"),
    "child": (lambda m: m.blocks.__setitem__(1, m.blocks[0]), "blocks.1"),
    "removed child": (remove_block, "blocks.1"),
    "new child": (lambda m: m.blocks.append(Block()), "blocks.2"),
    "function": (lambda m: setattr(m.blocks[1], "function", other), "blocks.1.function"),
    "removed function": (lambda m: delattr(m.blocks[1], "function"), "blocks.1.function"),
    "deep": (lambda m: setattr(m.blocks[1].linear, "forward", other), "blocks.1.linear.forward"),
    "hook": (lambda m: m.blocks[1].register_forward_hook(other), "blocks.1.forward"),
    "hook before": (lambda m: m.blocks[1].register_forward_pre_hook(other), "blocks.1.forward"),
    "number": (lambda m: setattr(m.blocks[1], "num_heads", 4), "blocks.1.num_heads"),
    "removed number": (lambda m: delattr(m.blocks[1], "num_heads"), "blocks.1.num_heads"),
    "text of torch's": (lambda m: setattr(m.blocks[0].conv, "padding_mode", "circular"), "blocks.0.conv.padding_mode"),
    "flag": (lambda m: m.blocks[0].eval(), "blocks.0.drop.training"),
    "in place": (lambda m: m.blocks[0].axes.append(3), "blocks.0.axes"),
    "class": (lambda m: setattr(m.blocks[0], "__class__", type("Mine", (Block,), {})), "blocks.0.__class__"),
}


@pytest.mark.parametrize(("swap", "place"), SWAPS.values(), ids=SWAPS)
def test_a_swap_is_noticed(swap: Callable[[Any], Any], place: str) -> None:
    model = Model()
    snapshot = Snapshot(model, {})
    assert snapshot.changes() == []
    swap(model)
    assert [change.place for change in snapshot.changes()] == [place]


def test_methods_of_classes_and_functions_of_their_modules() -> None:
    snapshot = Snapshot(Model(), {})
    for target, name in ((Block, "forward"), (__import__("sys").modules[__name__], "attend")):
        with unittest.mock.patch.object(target, name, other):
            (change,) = snapshot.changes()
        assert change.place.endswith(f".{name}")
        assert not change.inside
        assert snapshot.changes() == []


HARMLESS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "a forward": lambda m: m.blocks[0](7),
    "equal data": lambda m: setattr(m.blocks[0], "axes", [1, 2]),
    "new data": lambda m: setattr(m.blocks[0], "swapped_out", {}),
    "what manages memory": lambda m: setattr(m.blocks[0], "weight_function", [other]),
    "a name that the model does not know": lambda m: setattr(m, "forward_before", m.forward_orig),
    "its own method": lambda m: setattr(m, "forward_orig", m.forward_orig),
    "weights": lambda m: setattr(m.blocks[0].linear, "weight", nn.Parameter(m.blocks[0].linear.weight * 2)),
}


def test_numbers_of_classes_and_of_their_modules() -> None:
    model = Model()
    snapshot = Snapshot(model, {})
    with unittest.mock.patch.object(__import__("sys").modules[__name__], "HALVES", 3):
        (change,) = snapshot.changes()
    assert (change.place.rpartition(".")[2], change.before, change.value) == ("HALVES", "2", 3)


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_is_no_swap(change: Callable[[Any], Any]) -> None:
    model = Model()
    snapshot = Snapshot(model, {})
    change(model)
    assert snapshot.changes() == []


PATH = "diffusion_model.blocks.0.forward"


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), Uncomparable()], ids=["tensor", "array", "object"])
def test_a_value_that_cannot_be_compared_is_another_one(value: Any) -> None:
    model = Model()
    model.blocks[0].function = torch.zeros(2)
    snapshot = Snapshot(model, {})
    assert snapshot.is_current()
    model.blocks[0].function = value
    assert not snapshot.is_current()


def test_what_another_branch_left_is_no_swap_and_may_be_taken_back() -> None:
    model = Model()
    plain = model.blocks[0].forward
    model.blocks[0].forward = other
    backup = {PATH: plain}
    snapshot = Snapshot(model, backup)
    assert snapshot.changes() == []
    model.blocks[0].forward = plain
    backup.clear()
    assert snapshot.changes() == []


def test_what_another_branch_applies_is_no_swap() -> None:
    model = Model()
    backup: dict[str, Any] = {}
    snapshot = Snapshot(model, backup)
    backup[PATH], model.blocks[0].forward = model.blocks[0].forward, other
    assert snapshot.changes() == []
    model.blocks[1].forward = other
    assert [change.place for change in snapshot.changes()] == ["blocks.1.forward"]


def test_a_swap_of_what_another_branch_left_is_a_swap() -> None:
    model = Model()
    backup = {PATH: model.blocks[0].forward}
    model.blocks[0].forward = other
    snapshot = Snapshot(model, backup)
    model.blocks[0].forward = lambda x: x
    assert [change.place for change in snapshot.changes()] == ["blocks.0.forward"]


def test_a_hook_that_is_removed_and_what_was_injected_and_is_ejected() -> None:
    model = Model()
    hook = model.blocks[0].register_forward_hook(other)
    plain = model.blocks[1].forward
    model.blocks[1].forward = other
    snapshot = Snapshot(model, {})
    hook.remove()
    model.blocks[1].forward = plain
    assert snapshot.changes() == []


def test_the_sentence() -> None:
    model = Model()
    watch = SwapWatch(model, {})
    watch.check()
    watch.begin()
    with unittest.mock.patch.object(model, "blocks", nn.ModuleList()):
        watch.begin()  # a run within the run does not take the swap for the model
        with pytest.raises(SPError, match="The model's blocks was replaced while sampling") as caught:
            watch.check()
    assert "EasyCache" in str(caught.value)
    assert "Remove the node" in str(caught.value)
    watch.check()


def test_what_a_node_changed_behind_ours_is_noticed_when_sampling_begins() -> None:
    model = Model()
    set_heads(model.blocks[0], 5)  # another branch's
    watch = SwapWatch(model, {})
    watch.handing_out()
    set_heads(model.blocks[0], 4)
    with pytest.raises(
        SPError, match=r"The model's blocks.0.num_heads was changed from 5 to 4 behind SP Model Patch, which has no effect"
    ) as caught:
        watch.begin()
    assert "Place SP Model Patch after the node that changes it" in str(caught.value)
    assert not watch.sampling
    set_heads(model.blocks[0], 5)
    watch.begin()
    watch.end()
    set_heads(model.blocks[0], 6)
    watch.begin()  # nobody got a part of it from the stand-in, so it is another branch's


def test_a_number_that_is_changed_while_sampling() -> None:
    model = Model()
    watch = SwapWatch(model, {})
    watch.begin()
    set_heads(model.blocks[1], 1)
    with pytest.raises(SPError, match=r"The model's blocks.1.num_heads was changed from 3 to 1 while sampling"):
        watch.check()
