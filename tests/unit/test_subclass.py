"""A class that a pack made of a known one: the plan of that, and whether its code computes in the place of the model's."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from sp_core.errors import SPError
from sp_core.host.ui.stand_in import make_stand_in
from sp_core.host.ui.watch import SwapWatch
from sp_core.plans import code_of_packs, plan_of, replaced_methods
from sp_core.plans.architectures.wan import WAN


class Known(nn.Module):
    """Stands for ComfyUI's class."""

    def forward(self, x: object) -> object:
        return self._forward(x)

    def _forward(self, x: object) -> object:
        return x


Known.__module__, Known.__name__ = "comfy.ldm.wan.model", "WanModel"


class Harmless(Known):
    def __init__(self) -> None:
        super().__init__()
        self.more = 1

    def helper(self) -> int:
        return self.more


class OwnForward(Harmless):
    def _forward(self, x: object) -> object:
        return super()._forward(x)


class OfThat(OwnForward):
    pass


class Block(nn.Module):
    """Stands for a block of ComfyUI's."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Identity()

    def forward(self, x: object) -> object:
        return x


Block.__module__ = "comfy.ldm.wan.model"


class OwnBlock(Block):
    def forward(self, x: object) -> object:
        return x


class FromNothing(nn.Module):
    def forward(self, x: object) -> object:
        return x


@pytest.mark.parametrize(
    ("kind", "replaced"),
    [(Known, []), (Harmless, []), (OwnForward, ["_forward"]), (OfThat, ["_forward"])],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_plan_of_the_known_class_and_what_is_replaced(kind: type, replaced: list[str]) -> None:
    assert plan_of(kind) is WAN and replaced_methods(kind) == replaced


def test_a_class_of_nothing_that_is_known() -> None:
    assert not plan_of(FromNothing).splits_tokens and str(code_of_packs(plan_of(FromNothing), FromNothing(), FromNothing)).startswith(
        "From"
    )
    assert plan_of(FromNothing, Known) is WAN, "it stands in the place of a known one"


def model(block: nn.Module) -> nn.Module:
    made = Known()
    made.blocks = nn.ModuleList([Block(), block])
    return made


def test_code_of_packs() -> None:
    assert code_of_packs(WAN, model(Block()), Known) is None
    assert code_of_packs(WAN, model(Block()), Harmless) is None
    assert str(code_of_packs(WAN, model(Block()), FromNothing)).startswith("FromNothing of ")
    assert str(code_of_packs(WAN, model(Block()), OfThat)).startswith("OfThat of ")
    assert str(code_of_packs(WAN, model(OwnBlock()), Known)).startswith("OwnBlock of ")
    patched = Block()
    patched.self_attn = OwnBlock()
    assert str(code_of_packs(WAN, model(patched), Known)).startswith("OwnBlock of ")


class Asked:
    """Stands for the workers: notes what they are asked for."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    def forward(self, method: str, named: dict[str, Any], extra: dict[str, Any], options: dict[str, Any]) -> Any:
        self.methods.append(method)
        return named["x"]


def stand_in(kind: type) -> tuple[Any, Asked]:
    asked, local = Asked(), Known()
    return make_stand_in(local, kind, WAN, asked, SwapWatch(local, {}), {}), asked  # type: ignore[arg-type]


class OwnOuterForward(Known):
    def forward(self, *args: object, **kwargs: object) -> object:
        return 2 * super().forward(*args)  # type: ignore[operator, arg-type]


@pytest.mark.parametrize(
    ("kind", "method"), [(Known, "_forward"), (Harmless, "_forward"), (OwnForward, "_forward"), (OwnOuterForward, "forward")]
)
def test_which_forward_the_workers_run(kind: type, method: str) -> None:
    model, asked = stand_in(kind)
    assert model(3) == 3 and asked.methods == [method] and isinstance(model, kind)


def test_what_is_set_on_a_model_with_code_of_a_pack_is_refused() -> None:
    for kind in (Known, Harmless):
        stand_in(kind)[0].remembered = 5
    model, _ = stand_in(OwnForward)
    model.remembered = None
    with pytest.raises(SPError, match=r"remembered was set on the model, whose class OwnForward"):
        model.remembered = 5


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [(False, "replaced behind SP Model Patch .*Place SP Model Patch after the node"), (True, "replaced while sampling .*Remove the node")],
)
def test_a_class_that_is_put_on_the_stand_in_is_refused_with_what_to_do(sampling: bool, sentence: str) -> None:
    local = Known()
    watch = SwapWatch(local, {})
    model = make_stand_in(local, Known, WAN, Asked(), watch, {})  # type: ignore[arg-type]
    if sampling:
        watch.begin()
    with pytest.raises(SPError, match=f"__class__ was {sentence}"):
        model.__class__ = OwnForward


def test_the_stand_in_says_that_it_is_of_the_models_class() -> None:
    assert stand_in(Known)[0].__class__ in {Known}


def test_wrappers_do_not_reach_a_forward_of_a_pack() -> None:
    wrapped = {"transformer_options": {"wrappers": {"diffusion_model": {"a": [print]}}}}
    with pytest.raises(SPError, match="has a forward of its own"):
        stand_in(WithOptions)[0](3, **wrapped)


class WithOptions(Known):
    def forward(self, x: object, transformer_options: object = None) -> object:
        return x
