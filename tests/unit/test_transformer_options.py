"""Transformer options: what crosses to the workers, what stays, what is refused."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
import torch

from sp_core.errors import SPError
from sp_core.host.options import LATE_FORWARDS, name_of, patches_in
from sp_core.host.travel import Own
from sp_core.host.ui.departure import Departure
from sp_core.host.ui.known_objects import KnownObjects
from sp_core.host.ui.outgoing_options import OutgoingOptions, placed_too_late, with_own_patches


def patch(args: Any) -> Any:
    return args


class Callback:
    def __call__(self) -> None: ...

    def method(self) -> None: ...


class State:
    def __init__(self, step: int = 0) -> None:
        self.step = step


class Locked:
    """Cannot be sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, args: Any) -> Any:
        return args


def outgoing(given: dict[str, Any] | None = None, foreign_code: bool = True) -> OutgoingOptions:
    known = KnownObjects(given or {}, foreign_code)
    return OutgoingOptions(given or {}, known, Departure(torch.nn.Linear(2, 2), known.own))


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """What crosses of options of which nothing but plain data has to."""
    data, objects = outgoing(foreign_code=False).for_workers(options)
    assert objects is None
    return data


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
    assert plain(options) == options


def test_plain_data_that_code_inside_the_model_may_add_to_is_told_back() -> None:
    options = {"kept": {"count": [1]}, "cond_or_uncond": [0], "sigmas": torch.tensor([0.5]), "run_vx": False, "wrappers": {}}
    data, objects = outgoing(foreign_code=True).for_workers(options)
    assert objects is not None and set(data) == {"sigmas", "run_vx"}
    assert options["kept"] in objects.objects and options["cond_or_uncond"] in objects.objects
    assert outgoing(foreign_code=False).for_workers({**options, "patches": {"double_block": [patch]}})[1] is not None


def test_what_is_used_around_the_model_stays() -> None:
    around = {"wrappers": {"diffusion_model": {}}, "callbacks": {}, "easycache": State(), "context_window": State()}
    assert plain({**around, "total_blocks": 3}) == {"total_blocks": 3}


@pytest.mark.parametrize("value", [State(), [1, {"deep": State()}], State], ids=["object", "deep", "class"])
def test_an_object_that_the_workers_do_not_have_crosses(value: Any) -> None:
    data, objects = outgoing().for_workers({"state": value, "a": 1})
    assert data == {"a": 1} and objects is not None and value in objects.objects


@pytest.mark.parametrize("value", [Locked(), [1, {"deep": Locked()}]], ids=["object", "deep"])
def test_an_object_that_cannot_is_refused_by_name(value: Any) -> None:
    with pytest.raises(SPError, match=r"transformer_options\['state'\].*test_transformer_options.*\.lock is a lock") as caught:
        outgoing().for_workers({"state": value, "a": 1})
    assert "Place SP Model Patch after the node that adds it" in str(caught.value)


@pytest.mark.parametrize("deep", [False, True])
def test_objects_that_the_workers_have(deep: bool) -> None:
    """ComfyUI copies the dictionaries and lists of options with every clone, and keeps the objects."""
    state = State()

    def options() -> dict[str, Any]:
        return {"state": {"held": [state]} if deep else state, "a": 1}

    known = outgoing(options())
    assert known.for_workers(options()) == ({"a": 1}, None)
    state.step = 1
    with pytest.raises(SPError, match="changes while sampling"):
        known.for_workers(options())


def test_another_object_under_a_known_name() -> None:
    """Where nothing of another pack is inside the model, only code around it can read the object, and that is here."""
    alone = outgoing({"state": State()}, foreign_code=False)
    assert alone.for_workers({"state": State(5)}) == ({}, None)
    with pytest.raises(SPError, match="changes while sampling"):
        outgoing({"state": State()}).for_workers({"state": State()})
    with pytest.raises(SPError, match="changes while sampling"):
        alone.for_workers({"state": State(5), "patches": {"attn1_patch": [patch]}})
    assert alone.for_workers({"state": State})[1] is not None


PATCHES: list[tuple[Any, str]] = [
    (lambda f: {"patches": {"attn1_patch": [f]}}, "patches.attn1_patch"),
    (lambda f: {"patches_replace": {"dit": {("double_block", 3): f}}}, "patches_replace.dit.('double_block', 3)"),
    (lambda f: {"optimized_attention_override": f}, "optimized_attention_override"),
    (lambda f: {LATE_FORWARDS: {"diffusion_model.blocks.0.ffn.forward": f}}, "blocks.0.ffn.forward"),
]


@pytest.mark.parametrize(("make", "place"), PATCHES, ids=[place for _, place in PATCHES])
def test_patches_inside_the_model(make: Any, place: str) -> None:
    assert patches_in(make(patch)) == [(place, patch)]
    outgoing().check(make(patch))
    data, objects = outgoing().for_workers({**make(patch), "a": 1})
    assert data == {"a": 1} and objects is not None and patch in objects.objects


@pytest.mark.parametrize(("make", "place"), PATCHES, ids=[place for _, place in PATCHES])
def test_patches_that_cannot_be_sent(make: Any, place: str) -> None:
    options = make(Locked())
    with pytest.raises(SPError, match="while sampling") as sampling:
        outgoing().for_workers(options)
    with pytest.raises(SPError, match="Place SP Model Patch after") as late:
        outgoing().check(options)
    for caught in (sampling, late):
        assert place in str(caught.value)
        assert "Locked of " in str(caught.value)
        assert "it.lock is a lock" in str(caught.value)


@pytest.mark.parametrize("given", [make(patch) for make, _ in PATCHES[:3]], ids=[place for _, place in PATCHES[:3]])
def test_patches_that_the_workers_have(given: dict[str, Any]) -> None:
    """They are marks here: nothing of them is sent, unless a late patch stands beside them or builds on one."""
    sorted_out, own = outgoing(given), with_own_patches({**given, "a": 1})
    assert all(isinstance(function, Own) for _, function in patches_in(own))
    assert sorted_out.for_workers(own) == ({"a": 1}, None)
    _, objects = sorted_out.for_workers({**own, "patches": {**own.get("patches", {}), "double_block": [patch]}})
    assert objects is not None and [entry for entry in objects.tree["table"] if entry[0] == "own"]


def test_a_patch_that_is_taken_away_again() -> None:
    _, objects = outgoing({"optimized_attention_override": patch}).for_workers({})
    assert objects is not None and [pair for pair in objects.tree["table"][0][1] if pair[0] == "optimized_attention_override"] == [
        ["optimized_attention_override", None]
    ]


@pytest.mark.parametrize("options", [{}, {"patches": {}, "patches_replace": {}}, {"patches": {"double_block": []}}, {"patches": None}])
def test_no_patches(options: dict[str, Any]) -> None:
    assert patches_in(options) == []
    outgoing().check(options)
    assert plain(options) == {}


def test_names() -> None:
    assert name_of(patch).startswith("patch of ")
    assert name_of(Callback().method).startswith("Callback.method of ")
    assert name_of(Callback()).startswith("Callback of ")


def test_nobody_is_asked_to_stand_behind_a_node_without_a_model() -> None:
    sentence = str(placed_too_late("A patch", "MultimodalGuider (node 7)", gives_model=False))
    assert "Place SP Model Patch" not in sentence
    assert "Remove MultimodalGuider (node 7), or SP Model Patch" in sentence


def test_the_models_own_sampling_crosses_as_the_workers_own() -> None:
    own, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for foreign_code in (False, True):
        known = KnownObjects({}, foreign_code, model_sampling=own)
        going = OutgoingOptions({}, known, Departure(torch.nn.Linear(2, 2), known.own))
        _, objects = going.for_workers({"model_sampling": own})
        assert objects is not None and ["own", ["model_sampling"]] in objects.tree["table"]
        if foreign_code:
            with pytest.raises(SPError, match=r"transformer_options\['model_sampling'\]"):
                going.for_workers({"model_sampling": other})
        else:
            assert going.for_workers({"model_sampling": other}) == ({}, None)
