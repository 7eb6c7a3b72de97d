"""What torch.compile made is taken out of a model again, and what was asked of it is kept."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from sp_core.host.compiled import COMPILE_ARGUMENTS, COMPILE_KEY, asked_for, is_compiled, original, plain_wish
from sp_core.host.worker.uncompiled import uncompile


class Block(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Patcher:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.object_patches: dict[str, Any] = {}
        self.object_patches_backup: dict[str, Any] = {}
        self.wrappers: dict[str, Any] = {}
        self.model_options: dict[str, Any] = {}
        self.attachments: dict[str, Any] = {}


@pytest.fixture
def patcher(monkeypatch: pytest.MonkeyPatch) -> Patcher:
    utils = types.ModuleType("comfy.utils")
    utils.get_attr = lambda model, path: model.get_submodule(path)  # type: ignore[attr-defined]
    comfy = types.ModuleType("comfy")
    comfy.utils = utils  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy", comfy)
    monkeypatch.setitem(sys.modules, "comfy.utils", utils)
    model = nn.Module()
    model.diffusion_model = nn.Sequential(nn.Linear(2, 2), Block(), nn.Linear(2, 2))
    return Patcher(model)


def compiled(value: Any) -> Any:
    return torch.compile(value, backend="eager")


def test_what_it_was_made_of() -> None:
    module = Block()
    assert original(compiled(module)) is module
    assert original(compiled(module.forward)) == module.forward
    empty = nn.ModuleList()
    assert original(compiled(empty)) is empty
    for value in (module, module.forward, 5, None):
        assert original(value) is value
        assert not is_compiled(value)


def test_object_patches(patcher: Patcher) -> None:
    inner = patcher.model.diffusion_model
    other = nn.Linear(2, 2)
    patcher.object_patches = {"diffusion_model.0": compiled(inner[0]), "diffusion_model.2": compiled(other), "diffusion_model.1": other}
    for _ in ("first load", "second load"):
        assert uncompile(patcher) == plain_wish({"backend": "eager"})
    assert patcher.object_patches == {"diffusion_model.2": other, "diffusion_model.1": other}


def test_parts_that_a_node_put_in_place(patcher: Patcher) -> None:
    whole = patcher.model.diffusion_model
    first, last = whole[0], whole[2]
    whole[0] = compiled(first)
    whole[1].forward = compiled(whole[1].forward)
    last.compile(backend="eager")
    patcher.model.diffusion_model = compiled(whole)
    assert uncompile(patcher) == plain_wish({"backend": "eager"})
    assert patcher.model.diffusion_model is whole
    assert whole[0] is first
    assert "forward" not in whole[1].__dict__
    assert last._compiled_call_impl is None


def test_what_a_wrapper_asks_for(patcher: Patcher) -> None:
    assert uncompile(patcher) is None
    patcher.model_options[COMPILE_ARGUMENTS] = {"backend": "inductor", "dynamic": True}
    assert uncompile(patcher) is None, "a node that is no longer there"
    patcher.wrappers["apply_model"] = {COMPILE_KEY: [lambda executor: None]}
    assert uncompile(patcher) == plain_wish({"dynamic": True})


def a_backend(graph: Any, inputs: Any) -> Any:
    return graph


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {}),
        ({"mode": "max-autotune", "dynamic": True}, {"mode": "max-autotune", "dynamic": True}),
        (
            {"fullgraph": True, "options": {"max_autotune": True, "guard_filter_fn": len}},
            {"fullgraph": True, "options": {"max_autotune": True}},
        ),
        ({"backend": a_backend}, {"backend": "a_backend"}),
    ],
)
def test_arguments_as_plain_data(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    nothing = {"backend": "inductor", "mode": None, "dynamic": None, "fullgraph": False, "options": {}}
    assert plain_wish(arguments) == nothing | expected


@pytest.mark.parametrize("arguments", [{"backend": "aot_eager", "dynamic": False, "fullgraph": True}, {"options": {"max_autotune": True}}])
def test_what_was_asked_is_read_from_what_was_made(arguments: dict[str, Any]) -> None:
    assert asked_for(torch.compile(Block(), **arguments)) == plain_wish(arguments)
