"""What is known of a model without a plan: where its computing begins, what may need weights, and what can be called its blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sp_core.host.ui.stand_in import make_stand_in
from sp_core.host.ui.watch import SwapWatch
from sp_core.plans import PLANS, plan_of, runs_wrappers
from sp_core.plans.unplanned import blocks_in, entry_of


class WrapperExecutor:
    """Stands for ComfyUI's."""

    def __init__(self, function: Any) -> None:
        self.execute = function


class Dispatching(nn.Module):
    """As Flux and UNets."""

    def forward(self, x: Any, timesteps: Any = None, transformer_options: Any = None, **kwargs: Any) -> Any:
        return WrapperExecutor(self._forward).execute(x, timesteps, transformer_options=transformer_options, **kwargs)

    def _forward(self, x: Any, timesteps: Any = None, transformer_options: Any = None, **kwargs: Any) -> Any:
        return x

    def unpatchify(self, x: Any) -> Any:
        return x, "here"

    def _helper(self) -> None: ...


class Preparing(Dispatching):
    """As Anima."""

    def preprocess_text_embeds(self, text: Any) -> Any:
        return text

    def forward(self, x: Any, timesteps: Any = None, **kwargs: Any) -> Any:
        self.preprocess_text_embeds(x)
        return super().forward(x, timesteps, **kwargs)


class Computing(Dispatching):
    """Its forward does something with weights before or after."""

    def forward(self, x: Any, timesteps: Any = None, **kwargs: Any) -> Any:
        return self.scale * WrapperExecutor(self._forward).execute(x)


class ByAnotherWay(Dispatching):
    """As CausalWan."""

    def forward_block(self, x: Any) -> Any:
        return x

    def forward(self, x: Any, timesteps: Any = None, **kwargs: Any) -> Any:
        return self.forward_block(x) if timesteps else super().forward(x)


class Plain(nn.Module):
    """As SD3: no wrappers."""

    def forward(self, x: Any, timesteps: Any, context: Any = None, **kwargs: Any) -> Any:
        return self._forward(x)

    def _forward(self, x: Any) -> Any:
        return x


class HandsOn(nn.Module):
    """A wrapper that a pack puts around a model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args


@pytest.mark.parametrize(
    ("kind", "entry", "wrappers"),
    [
        (Dispatching, "_forward", True),
        (Preparing, "_forward", True),
        (Computing, "forward", True),
        (ByAnotherWay, "forward", True),
        (Plain, "forward", False),
        (HandsOn, "forward", False),
    ],
)
def test_where_a_models_computing_begins(kind: type, entry: str, wrappers: bool) -> None:
    assert entry_of(kind) == entry and runs_wrappers(kind) is wrappers


def test_a_class_without_a_plan() -> None:
    plan = plan_of(Preparing)
    assert plan.architecture == "Preparing" and plan.forward == "_forward" and not plan.splits_tokens
    assert set(plan.weight_methods) == {"unpatchify", "preprocess_text_embeds"} and not plan.keeps_state
    assert all(other.splits_tokens for other in PLANS.values())


def test_blocks() -> None:
    model = nn.Module()
    first, second, third, fourth, fifth = (nn.Linear(1, 1) for _ in range(5))
    model.embed, model.inner = nn.Linear(1, 1), nn.Module()
    # as a UNet: lists of sequences, whose members are called one by one
    model.input_blocks = nn.ModuleList([nn.Sequential(first, second), nn.ModuleList([third])])
    model.inner.layers = nn.ModuleList([fourth])
    fifth.parts = nn.ModuleList([nn.Linear(1, 1)])
    model.output_blocks = nn.ModuleList([fifth])
    assert blocks_in(model) == [fourth, first, second, third, fifth], "what lies in a block is no block"


class Asked:
    """Stands for the workers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def forward(self, method: str, named: dict[str, Any], extra: dict[str, Any], options: dict[str, Any]) -> Any:
        self.asked.append((method, list(named), list(extra), options))
        return "there"

    def call(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.asked.append(method)
        return "there"


def stand_in(kind: type) -> tuple[Any, list[Any]]:
    asked, local = Asked(), kind()
    return make_stand_in(local, kind, plan_of(kind), asked, SwapWatch(local, {}), {}), asked.asked  # type: ignore[arg-type]


def test_what_computes_in_the_workers() -> None:
    model, asked = stand_in(Dispatching)
    assert model(1, 2, context=3, transformer_options={"a": 1}) == "there"
    assert asked == [("_forward", ["x", "timesteps"], ["context"], {"a": 1})]
    model, asked = stand_in(HandsOn)
    assert model(1, 2, context=3, transformer_options={}) == "there"
    assert asked == [("forward", ["x", "timestep"], ["context"], {})], "as ComfyUI calls every model"


def test_a_method_goes_to_the_workers_where_it_may_need_weights() -> None:
    model, asked = stand_in(Dispatching)
    assert model.unpatchify(torch.ones(1)) == "there" and asked == ["unpatchify"]
    assert model.unpatchify(x=3) == (3, "here") and asked == ["unpatchify"]
