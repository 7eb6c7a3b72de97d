"""The first node whose MODEL is another one in a worker is named, with the ranks that have it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sp_core.errors import SPError
from sp_core.host.model_digest import CODE, VALUES, WEIGHT_PATCHES, WEIGHTS, Part, as_plain
from sp_core.host.ui.recipe import Recipe
from sp_core.host.ui.same_models import check_same_models


def digest(strength: float, code: str = "a function", weights: str = "a linear layer", mark: float = 7.0) -> dict[str, Part]:
    return {
        WEIGHTS: Part(weights, []),
        VALUES: Part(weights, [[mark, 0.0]], ["ffn.weight"]),
        WEIGHT_PATCHES: Part("one patch", [[strength, strength]], ["ffn.weight"]),
        CODE: Part(code, []),
    }


RECIPE = Recipe(
    {},
    "Lora-2",
    0,
    {"Load-1": "UNETLoader (node 1)", "Lora-2": "RandomLora (node 7)", "Shift-3": "Shift (node 9)"},
    models={("Load-1", 0): [digest(1.0)], ("Lora-2", 0): [digest(0.5)], ("Shift-3", 0): [digest(0.5)]},
)


def rank(*strengths: float | None) -> list[Any]:
    return [None if strength is None else [as_plain(digest(strength))] for strength in strengths]


@pytest.mark.parametrize("other", [rank(1.0, 0.5, 0.5), rank(1.0, 0.501, 0.5), rank(1.0, None, None)], ids=["equal", "last bits", "gone"])
def test_the_same(other: list[Any]) -> None:
    check_same_models(RECIPE, [rank(1.0, 0.5, 0.5), other])


@pytest.mark.parametrize(
    ("by_rank", "says"),
    [
        ([rank(1.0, 0.5, 0.5), rank(1.0, 0.9, 0.9)], r"RandomLora \(node 7\) made another model in the worker of rank 1 "),
        ([rank(2.0, 0.9, 0.9), rank(1.0, 0.5, 0.5)], r"UNETLoader \(node 1\) .* of rank 0 .*the weight patches have other values"),
        ([[*rank(1.0), [], *rank(0.5)], rank(1.0, 0.5, 0.5)], "of rank 0 .*a list of 0 models instead of 1"),
    ],
)
def test_another(by_rank: list[Any], says: str) -> None:
    with pytest.raises(SPError, match=says):
        check_same_models(RECIPE, by_rank)


def test_patches_of_weights_are_compared_with_comfyuis_process() -> None:
    with pytest.raises(SPError, match=r"RandomLora \(node 7\) .* of ranks 0, 1 "):
        check_same_models(RECIPE, [rank(1.0, 0.9, 0.5), rank(1.0, 0.9, 0.5)])


def test_values_of_weights_are_compared_with_comfyuis_process_where_they_are_of_one_kind() -> None:
    """A file that was replaced since ComfyUI read it. On a device of another kind ComfyUI may hold another type."""
    other = [[[as_plain(digest(strength, mark=8.0))] for strength in (1.0, 0.5, 0.5)]] * 2
    with pytest.raises(SPError, match=r"UNETLoader \(node 1\) .* of ranks 0, 1 .*the weights have other values \(if their file"):
        check_same_models(RECIPE, other)
    check_same_models(RECIPE, [[[as_plain(digest(strength, weights="another", mark=8.0))] for strength in (1.0, 0.5, 0.5)]] * 2)


def test_the_rest_is_compared_with_comfyuis_process_where_something_is_left_out() -> None:
    alike = [[[as_plain(digest(strength, code="another function"))] for strength in (1.0, 0.5, 0.5)]] * 2
    check_same_models(RECIPE, alike)
    with pytest.raises(SPError, match=r"UNETLoader \(node 1\) .* of ranks 0, 1 "):
        check_same_models(replace(RECIPE, fallback=RECIPE), alike)
