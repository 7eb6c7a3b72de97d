"""Transformer options: what crosses to the workers, what stays, what is refused."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch

from sp_core.errors import SPError
from sp_core.host.options import name_of, patches_in
from sp_core.host.ui.outgoing_options import for_workers, refuse_late_patches, without_model_patches


def patch(args: Any) -> Any:
    return args


class Callback:
    def __call__(self) -> None: ...

    def method(self) -> None: ...


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
    plain, kept = for_workers(options)
    assert plain == options
    assert kept == []


def test_what_runs_around_the_model_stays_without_a_word() -> None:
    plain, kept = for_workers({"wrappers": {"diffusion_model": {}}, "callbacks": {}, "total_blocks": 3})
    assert plain == {"total_blocks": 3}
    assert kept == []


def test_objects_stay_and_are_named() -> None:
    plain, kept = for_workers({"easycache": Callback(), "nested": {"deep": [object()]}, "a": 1})
    assert plain == {"a": 1}
    assert kept == ["easycache", "nested"]


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
        for_workers(options)
    with pytest.raises(SPError, match="Place SP Model Patch after") as late:
        refuse_late_patches(options)
    for caught in (sampling, late):
        assert place in str(caught.value)
        assert "patch of " in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"patches": {}, "patches_replace": {}}, {"patches": {"double_block": []}}, {"patches": None}])
def test_no_patches(options: dict[str, Any]) -> None:
    assert patches_in(options) == []
    refuse_late_patches(options)
    assert for_workers(options) == ({}, [])


def test_names() -> None:
    assert name_of(patch).startswith("patch of ")
    assert name_of(Callback().method).startswith("Callback.method of ")
    assert name_of(Callback()).startswith("Callback of ")
