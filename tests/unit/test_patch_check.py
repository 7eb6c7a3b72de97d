"""Which code inside a model is another pack's, and whether it keeps the rows of the batch apart."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sp_core.host.worker.patch_check import KNOWN, Known, foreign_code, wants_whole_batch
from sp_core.plans.override import OVERRIDE

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
    [code] = foreign_code(patched)
    assert "function.<locals>.patch of " in code.name
    assert wants_whole_batch(patched)


def test_code_that_comes_with_the_call_counts_too() -> None:
    assert not wants_whole_batch(patcher())
    assert wants_whole_batch(patcher(), {"patches": {"attn1_patch": [function()]}})


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
    assert foreign_code(patched) == []
    assert not wants_whole_batch(patched)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_known_code_is_taken_at_its_word(known: Known) -> None:
    if known.place == OVERRIDE:
        patched = patcher({OVERRIDE: function(known)})
    else:
        patched = patcher({"patches": {known.place.removeprefix("patches."): [function(known)]}})
    assert [code.known for code in foreign_code(patched)] == [known]
    assert wants_whole_batch(patched) is not known.rows_apart


def test_a_known_name_in_another_place_is_not_known() -> None:
    patched = patcher({"patches": {"attn2_patch": [function(KNOWN[0])]}})
    assert foreign_code(patched)[0].known is None
