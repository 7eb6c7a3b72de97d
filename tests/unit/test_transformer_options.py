"""Transformer options: what crosses to the workers, what stays, what is refused."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch

from sp_core.errors import SPError
from sp_core.host.options import name_of, patches_in
from sp_core.host.ui.known_objects import KnownObjects
from sp_core.host.ui.outgoing_options import for_workers, placed_too_late, refuse_late_patches, without_model_patches


def patch(args: Any) -> Any:
    return args


class Callback:
    def __call__(self) -> None: ...

    def method(self) -> None: ...


NOTHING = KnownObjects({}, foreign_code=True)


class State:
    def __init__(self, step: int = 0) -> None:
        self.step = step


def test_plain_data_crosses() -> None:
    options = {
        "cond_or_uncond": [1, 0],
        "uuids": [uuid.UUID(int=5)],
        "sigmas": torch.tensor([0.5]),
        "stg_self_attn_blocks": frozenset({1, 2}),
        "rope_options": {"scale_x": 1.5},
        "run_vx": False,
        "grid_sizes": torch.Size([3, 5, 7]),
    }
    assert for_workers(options, NOTHING) == options


def test_what_is_used_around_the_model_stays() -> None:
    around = {"wrappers": {"diffusion_model": {}}, "callbacks": {}, "easycache": State(), "context_window": State()}
    assert for_workers({**around, "total_blocks": 3}, NOTHING) == {"total_blocks": 3}


@pytest.mark.parametrize("value", [State(), [1, {"deep": State()}], lambda: None, State], ids=["object", "deep", "function", "class"])
def test_an_object_that_nobody_knows_is_refused_by_name(value: Any) -> None:
    with pytest.raises(SPError, match=r"transformer_options\['state'\].*test_transformer_options") as caught:
        for_workers({"state": value, "a": 1}, NOTHING)
    assert "Place SP Model Patch after the node that adds it" in str(caught.value)


@pytest.mark.parametrize("deep", [False, True])
def test_objects_that_the_workers_have(deep: bool) -> None:
    """ComfyUI copies the dictionaries and lists of options with every clone, and keeps the objects."""
    state = State()

    def options() -> dict[str, Any]:
        return {"state": {"held": [state]} if deep else state, "a": 1}

    known = KnownObjects(options(), foreign_code=True)
    assert for_workers(options(), known) == {"a": 1}
    state.step = 1
    with pytest.raises(SPError, match="changes while sampling"):
        for_workers(options(), known)


def test_another_object_under_a_known_name() -> None:
    """Where nothing of another pack is inside the model, only code around it can read the object, and that is here."""
    for_workers({"state": State(5)}, KnownObjects({"state": State()}, foreign_code=False))
    with pytest.raises(SPError, match="changes while sampling"):
        for_workers({"state": State()}, KnownObjects({"state": State()}, foreign_code=True))
    with pytest.raises(SPError, match="after SP Model Patch"):
        for_workers({"state": State}, KnownObjects({"state": State()}, foreign_code=False))


PATCHES: list[tuple[dict[str, Any], str]] = [
    ({"patches": {"attn1_patch": [patch]}}, "patches.attn1_patch"),
    ({"patches_replace": {"dit": {("double_block", 3): patch}}}, "patches_replace.dit.('double_block', 3)"),
    ({"optimized_attention_override": patch}, "optimized_attention_override"),
]


@pytest.mark.parametrize(("options", "place"), PATCHES)
def test_patches_inside_the_model(options: dict[str, Any], place: str) -> None:
    assert patches_in(options) == [(place, patch)]
    assert without_model_patches({**options, "a": 1}) == {"a": 1}
    with pytest.raises(SPError, match="while sampling") as sampling:
        for_workers(options, NOTHING)
    with pytest.raises(SPError, match="Place SP Model Patch after") as late:
        refuse_late_patches(options)
    for caught in (sampling, late):
        assert place in str(caught.value)
        assert "patch of " in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"patches": {}, "patches_replace": {}}, {"patches": {"double_block": []}}, {"patches": None}])
def test_no_patches(options: dict[str, Any]) -> None:
    assert patches_in(options) == []
    refuse_late_patches(options)
    assert for_workers(options, NOTHING) == {}


def test_names() -> None:
    assert name_of(patch).startswith("patch of ")
    assert name_of(Callback().method).startswith("Callback.method of ")
    assert name_of(Callback()).startswith("Callback of ")


def test_nobody_is_asked_to_stand_behind_a_node_without_a_model() -> None:
    sentence = str(placed_too_late("A patch", "MultimodalGuider (node 7)", gives_model=False))
    assert "Place SP Model Patch" not in sentence
    assert "Remove MultimodalGuider (node 7), or SP Model Patch" in sentence
