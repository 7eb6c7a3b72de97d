"""Caches that a model fills during a sampling run: numbers on both sides, tensors in the workers, of each rank's heads."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sp_core.errors import SPError
from sp_core.plans.kept_cache import KeptCache, RankCaches, as_plain, take_back, without_memory

CPU = torch.device("cpu")


def made(count: int = 2) -> list[KeptCache]:
    """As a model makes them on the meta device: room for 6 tokens, 4 heads of 3."""
    rooms = [{"k": torch.zeros(1, 6, 4, 3, device="meta"), "end": 0, "is_init": False} for _ in range(count)]
    return without_memory(rooms, itertools.count(7))


def test_a_cache_crosses_as_numbers_and_shapes() -> None:
    crossed = as_plain("kv_caches", made())
    assert crossed[1] == {"number": 8, "numbers": {"end": 0, "is_init": False}, "tensors": {"k": ["float32", 1, 6, 4, 3]}}


def test_a_worker_knows_a_cache_again() -> None:
    ranks, ours = RankCaches(CPU), made()
    first = ranks.arrived(as_plain("kv_caches", ours))
    first[0]["text"] = torch.ones(2)
    first[0]["is_init"], first[0]["end"] = True, 4
    take_back(ours, [cache.numbers for cache in first])
    assert (ours[0]["end"], ours[0]["is_init"], ours[1]["end"]) == (4, True, 0)
    ours[0]["end"] -= 2  # as a sampler does that overwrites frames
    again = ranks.arrived(as_plain("kv_caches", ours))
    assert again[0] is first[0] and again[0]["end"] == 2 and again[0]["text"] is first[0]["text"]
    ranks.forget()
    assert ranks.arrived(as_plain("kv_caches", ours))[0] is not first[0]


def test_it_keeps_the_heads_that_come() -> None:
    cache = RankCaches(CPU).arrived(as_plain("kv_caches", made()))[0]
    new = [torch.randn(1, tokens, 2, 3) for tokens in (1, 2, 2)]
    cache.make_room(1, "end")
    assert torch.equal(cache.extended("k", new[0]), new[0])
    cache.make_room(2, "end")
    cache.extended("k", new[1])
    cache["end"] -= 2
    cache.make_room(2, "end")
    assert torch.equal(cache.extended("k", new[2]), torch.cat([new[0], new[2]], 1)) and cache["end"] == 3


def test_a_model_that_computes_whole_finds_all_of_it() -> None:
    cache = RankCaches(CPU).arrived(as_plain("kv_caches", made()))[0]
    cache["k"][:, :1] = 2.0
    assert cache["k"].shape == (1, 6, 4, 3) and float(cache["k"].sum()) == 24.0


@pytest.mark.parametrize(("before", "heads", "tokens"), [(2, 3, 1), (2, 2, 6)], ids=["other heads", "no room"])
def test_what_does_not_fit_is_a_sentence(before: int, heads: int, tokens: int) -> None:
    cache = RankCaches(CPU).arrived(as_plain("kv_caches", made()))[0]
    cache.make_room(1, "end")
    cache.extended("k", torch.zeros(1, 1, before, 3))
    cache.make_room(tokens, "end")
    with pytest.raises(SPError, match="were shared out in another way"):
        cache.extended("k", torch.zeros(1, tokens, heads, 3))


def test_a_cache_of_somebody_else_is_refused() -> None:
    foreign: list[Any] = [{"k": torch.zeros(1, 6, 4, 3), "end": 0}]
    with pytest.raises(SPError, match="kv_caches was not made by the model's own method"):
        as_plain("kv_caches", foreign)
