"""That a model keeps its batch rows apart is proven before they are shared out: models that do, and models that do not."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.ranks import RankPool
from host.graphs import TOLERANCE
from host.row_ranks import serve

#: timesteps of the latents of a conditioning, for each forward
STEPS = [[0.9], [0.6], [0.3], [0.1], [0.05]]


@pytest.fixture(scope="module")
def ranks(comfyui: Path) -> Iterator[RankPool]:
    with RankPool(3, functools.partial(serve, str(comfyui))) as pool:
        yield pool


def forwards(ranks: RankPool, *case: Any) -> list[list[dict[str, Any]]]:
    """By forward, what the ranks told that had something to do."""
    by_rank = ranks.call(*case, timeout=300)
    failures = [told["failure"] for answers in by_rank for told in answers if told is not None and "failure" in told]
    assert not failures, failures[0]
    return [[told for told in of_all if told is not None] for of_all in zip(*by_rank, strict=True)]


SHARED = [
    ("Apart", 2, 1, "1 + 1, 1 idle"),
    ("Apart", 2, 3, "2 + 2 + 2"),
    ("Apart", 1, 5, "2 + 2 + 1"),
    ("Writing", 2, 2, "2 + 1 + 1"),
    ("UNet", 2, 1, "1 + 1, 1 idle"),
    ("UNet", 2, 2, "2 + 1 + 1"),
    ("UNet", 1, 4, "2 + 1 + 1"),
]


@pytest.mark.parametrize(("name", "conditionings", "latents", "counts"), SHARED)
def test_from_the_second_forward_on(ranks: RankPool, name: str, conditionings: int, latents: int, counts: str) -> None:
    first, *later = forwards(ranks, name, conditionings, latents, [step * latents for step in STEPS[:3]])
    assert all("each computes all" in told["told"] and told["error"] == 0 for told in first)
    for found in later:
        assert all(f"batch rows {counts}, " in told["told"] for told in found), found
        assert max(told["error"] for told in found) <= TOLERANCE
        assert len({told["entered"] for told in found}) == 1, "ranks enter equally many blocks, however many rows they have"


TOGETHER = [
    ("Mixing", 2, 1, "what one of them gives depends on the others"),
    ("Mixing", 1, 3, "what one of them gives depends on the others"),
    ("video UNet", 1, 3, "what one of them gives depends on the others"),
    ("Normalising", 2, 1, "what one of them gives depends on the others"),
    ("OnlyWhole", 2, 2, "does not compute some of them alone"),
    ("Noisy", 2, 1, "what one of them gives depends on the others"),
    ("Counting", 2, 1, "keeps something between forwards (.count)"),
    ("Filling", 2, 1, "keeps something between forwards (.seen)"),
]


@pytest.mark.parametrize(("name", "conditionings", "latents", "why"), TOGETHER)
def test_what_is_not_apart_is_computed_on_one_device(ranks: RankPool, name: str, conditionings: int, latents: int, why: str) -> None:
    found = forwards(ranks, name, conditionings, latents, [step * latents for step in STEPS])
    for told in found:
        assert all(one["ranks"] == 1 for one in told) and told[0]["error"] == 0, told
    assert len(found[-1]) == 1 and why in found[-1][0]["told"], found[-1]


def test_a_table_that_is_made_once_is_nothing_kept(ranks: RankPool) -> None:
    first, second, *later = forwards(ranks, "MakesATable", 2, 1, STEPS)
    assert all("each computes all" in told["told"] for told in (*first, *second))
    assert all("batch rows 1 + 1" in told["told"] and told["error"] <= TOLERANCE for found in later for told in found)


def test_conditionings_of_a_video_unet_are_not_apart_where_their_frames_are_cut(ranks: RankPool) -> None:
    """Two conditionings of three frames on three devices: the shares would cut through both."""
    assert "depends on the others" in forwards(ranks, "video UNet", 2, 3, [[0.5] * 3] * 2)[-1][0]["told"]


def test_other_timesteps_for_each_row_are_another_kind(ranks: RankPool) -> None:
    """A model that takes the first timestep for all looks as if it kept its rows apart until they differ."""
    found = forwards(ranks, "OfTheFirstTimestep", 1, 2, [[0.5, 0.5], [0.4, 0.4], [0.4, 0.3], [0.3, 0.2]])
    assert "batch rows 1 + 1" in found[1][0]["told"]
    assert "each computes all" in found[2][0]["told"] and "depends on the others" in found[3][0]["told"]
    assert all(told["error"] <= TOLERANCE for of_all in found for told in of_all)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_of_small_types_hides_nothing_and_is_no_difference(ranks: RankPool, dtype: str) -> None:
    found = forwards(ranks, "Apart", 2, 1, STEPS[:2], dtype)
    assert all("batch rows 1 + 1" in told["told"] for told in found[1])
    assert "depends on the others" in forwards(ranks, "Mixing", 2, 1, STEPS[:2], dtype)[1][0]["told"], "less than these types round"
