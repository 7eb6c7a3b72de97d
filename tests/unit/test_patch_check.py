"""Which code inside a model is another pack's, and whether it keeps the rows of the batch apart."""

from __future__ import annotations

import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from sp_core.host.worker.patch_check import (
    KNOWN,
    Known,
    foreign_code,
    foreign_inside,
    gets_whole_data,
    methods_set_on,
    unknown_functions,
    wants_whole_batch,
)
from sp_core.plans.override import OVERRIDE
from sp_core.settings import trust_patches

FFN = "diffusion_model.blocks.0.ffn"


def function(known: Known | None = None) -> Callable[..., Any]:
    def patch(*args: Any) -> Any:
        return args[0]

    if known is not None:
        patch.__qualname__, patch.__module__ = known.name, f"/packs/some{known.module}"
    return patch


def patcher(options: dict[str, Any] | None = None, patches: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(model_options={"transformer_options": options or {}}, object_patches=patches or {})


INSIDE = {
    "an override": patcher({OVERRIDE: function()}),
    "a patch": patcher({"patches": {"attn1_patch": [function()]}}),
    "a block replacement": patcher({"patches_replace": {"dit": {("double_block", 1): function()}}}),
    "a forward": patcher(patches={f"{FFN}.forward": function()}),
    "a module": patcher(patches={FFN: function()}),
}


@pytest.mark.parametrize("patched", INSIDE.values(), ids=INSIDE)
def test_unknown_code_gets_all_rows(patched: Any) -> None:
    [code] = foreign_code(patched, {})
    assert "function.<locals>.patch of " in code.name
    assert wants_whole_batch(patched, {})
    assert gets_whole_data(patched, {})


#: what lies where, and the modules that compute by it
OWNERS = {
    "a forward": ({f"{FFN}.forward": function()}, ["blocks.0.ffn"]),
    "a module": ({FFN: nn.Identity()}, ["blocks.0.ffn"]),
    "all blocks": ({"diffusion_model.blocks": nn.ModuleList([nn.Identity(), nn.Identity()])}, ["blocks.0", "blocks.1"]),
    "a method": ({"diffusion_model.blocks.0.norm_them": function()}, ["blocks.0"]),
    "a number": ({f"{FFN}.chunks": 4}, []),
    "known code": ({f"{FFN}.forward": function(next(known for known in KNOWN if known.place == ".ffn.forward"))}, []),
    "beside the model": ({"model_sampling": function()}, []),
}


def blocks() -> nn.Module:
    block = nn.ModuleDict({"ffn": nn.Linear(2, 2)})
    return nn.ModuleDict({"blocks": nn.ModuleList([block])})


@pytest.mark.parametrize(("patches", "owners"), OWNERS.values(), ids=OWNERS)
def test_the_module_whose_code_was_replaced_gets_whole_data(patches: dict[str, Any], owners: list[str]) -> None:
    patched, model = patcher(patches=patches), blocks()
    patched.model = SimpleNamespace(diffusion_model=model)
    assert list(foreign_inside(patched, dict(model.named_modules())).modules) == owners


def test_a_forward_that_was_set_without_the_patcher_counts_too() -> None:
    patched, model = patcher(), blocks()
    patched.model = SimpleNamespace(diffusion_model=model)
    model.get_submodule("blocks.0.ffn").forward = function()  # type: ignore[method-assign]
    modules = dict(model.named_modules())
    assert list(foreign_inside(patched, modules).modules) == ["blocks.0.ffn"]
    assert wants_whole_batch(patched, modules) and gets_whole_data(patched, modules)
    assert [place for place, _ in unknown_functions(patched, modules)] == ["blocks.0.ffn.forward"]


def test_a_forward_that_was_put_back_is_the_models_own() -> None:
    patched, model = patcher(), blocks()
    patched.model = SimpleNamespace(diffusion_model=model)
    ffn = model.get_submodule("blocks.0.ffn")
    ffn.forward = ffn.forward  # type: ignore[method-assign]
    assert "forward" in vars(ffn)
    assert foreign_inside(patched, dict(model.named_modules())).modules == {}


def test_code_that_comes_with_the_call_counts_too() -> None:
    assert not wants_whole_batch(patcher(), {})
    assert wants_whole_batch(patcher(), {}, {"patches": {"attn1_patch": [function()]}})


@pytest.mark.parametrize(
    "patched",
    [
        patcher(patches={"model_sampling": function()}),
        patcher(patches={"diffusion_model.some_number": 3}),
        patcher({"wrappers": {"outer": function()}, "sample_sigmas": [1.0]}),
    ],
    ids=["beside the model", "a number", "around the model"],
)
def test_what_is_not_code_inside_the_model(patched: Any) -> None:
    assert foreign_code(patched, {}) == []
    assert not wants_whole_batch(patched, {})


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_known_code_is_taken_at_its_word(known: Known) -> None:
    if known.place == OVERRIDE:
        patched = patcher({OVERRIDE: function(known)})
    elif known.place.startswith("."):
        patched = patcher(patches={f"diffusion_model.blocks.0{known.place}": function(known)})
    else:
        patched = patcher({"patches": {known.place.removeprefix("patches."): [function(known)]}})
    assert [code.known for code in foreign_code(patched, {})] == [known]
    assert wants_whole_batch(patched, {}) is not known.rows_apart
    assert gets_whole_data(patched, {}) is not known.parts_apart


def test_a_known_name_in_another_place_is_not_known() -> None:
    patched = patcher({"patches": {"attn2_patch": [function(KNOWN[0])]}})
    assert foreign_code(patched, {})[0].known is None


@pytest.mark.parametrize("patched", INSIDE.values(), ids=INSIDE)
def test_unknown_code_is_probed_where_it_sits(patched: Any) -> None:
    [(place, found)] = unknown_functions(patched, {})
    assert place in foreign_code(patched, {})[0].place
    assert callable(found)


def test_known_code_is_not_probed() -> None:
    known = next(known for known in KNOWN if known.place == OVERRIDE)
    assert unknown_functions(patcher({OVERRIDE: function(known)}), {}) == []


@pytest.mark.parametrize("patched", INSIDE.values(), ids=INSIDE)
def test_trusted_code_gets_no_whole_data(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SP_TRUST_PATCHES", "1")
    assert not wants_whole_batch(patched, {})
    assert not gets_whole_data(patched, {})
    assert unknown_functions(patched, {}) == []
    found = foreign_inside(patched, {})
    assert found.trusted
    assert found.modules == {}
    assert found.name(OVERRIDE, function()) is None


@pytest.mark.parametrize(("value", "trusts"), [("1", True), ("0", False), ("", False)])
def test_what_the_setting_means(value: str, trusts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SP_TRUST_PATCHES", value)
    assert trust_patches() is trusts


def test_methods_that_were_set_on_a_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert methods_set_on(model) == []
    model.append = types.MethodType(nn.Sequential.append, model)  # type: ignore[method-assign]
    assert methods_set_on(model) == [], "its own, put back"
    model.forward = lambda x: x  # type: ignore[method-assign, assignment]
    model.note = lambda x: x  # type: ignore[assignment]
    assert methods_set_on(model) == ["forward"]
