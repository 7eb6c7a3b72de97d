"""A part of the model that is swapped while it is sampled is noticed; what ComfyUI applies and takes back is not."""

from __future__ import annotations

import types
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from sp_core.errors import SPError
from sp_core.host.ui.snapshot import Snapshot, SwapWatch


def attend(x: Any) -> Any:
    return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.function = attend
        self.calls = 0

    def forward(self, x: Any) -> Any:
        return attend(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward_orig(self, x: Any) -> Any:
        return x


def other(*args: Any) -> Any:
    return args


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
    "data": lambda m: setattr(m.blocks[0], "calls", 5),
    "new data": lambda m: setattr(m.blocks[0], "swapped_out", {}),
    "a name that the model does not know": lambda m: setattr(m, "forward_before", m.forward_orig),
    "its own method": lambda m: setattr(m, "forward_orig", m.forward_orig),
    "weights": lambda m: setattr(m.blocks[0].linear, "weight", nn.Parameter(m.blocks[0].linear.weight * 2)),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_is_no_swap(change: Callable[[Any], Any]) -> None:
    model = Model()
    snapshot = Snapshot(model, {})
    change(model)
    assert snapshot.changes() == []


PATH = "diffusion_model.blocks.0.forward"


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
