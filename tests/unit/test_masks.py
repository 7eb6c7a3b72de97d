"""Masks in the order that attention sees, against tokens that are looked up one by one."""

from __future__ import annotations

import pytest
import torch

from sp_core.attention.masks import to_additive, to_rank_order
from sp_core.layout import FlatLayout, TileLayout

TILES = TileLayout((2, 4, 3), (2, 1), prefix=2, suffix=1)
ORDER = [token for rank in range(2) for token in torch.arange(TILES.tokens)[TILES.indices(rank)].tolist()]


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=["two dims", "three", "four"])
@pytest.mark.parametrize("replicated", [0, 4])
def test_queries_and_keys(shape: tuple[int, ...], replicated: int) -> None:
    order = [*range(replicated), *(replicated + token for token in ORDER)]
    mask = torch.randn(*shape, len(order), len(order))
    found = to_rank_order(mask, TILES, replicated=replicated)
    for query, query_raster in enumerate(order):
        for key, key_raster in enumerate(order):
            assert torch.equal(found[..., query, key], mask[..., query_raster, key_raster])


def test_broadcast_queries_stay() -> None:
    mask = torch.randn(1, 1, TILES.tokens)
    assert torch.equal(to_rank_order(mask, TILES), mask[..., ORDER])


def test_queries_that_are_no_tokens_of_the_layout_keep_their_order() -> None:
    """Even when there are as many of them."""
    mask = torch.randn(TILES.tokens, TILES.tokens)
    assert torch.equal(to_rank_order(mask, TILES, queries=False), mask[:, ORDER])


def test_a_flat_layout_changes_nothing() -> None:
    mask = torch.randn(9, 9)
    assert to_rank_order(mask, FlatLayout(9, 2)) is mask


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("of", FLOATS, ids=str)
def test_an_added_mask_keeps_what_is_finite_finite(of: torch.dtype, dtype: torch.dtype) -> None:
    """bf16 has neither fp32's least value nor fp16's."""
    mask = torch.tensor([0.0, -2.0, torch.finfo(of).min, -torch.inf], dtype=of)
    added = to_additive(mask, dtype)
    assert added.dtype == dtype
    assert added[:2].tolist() == [0.0, -2.0]
    assert added[2].isfinite() and added[2] <= -60000
    assert added[3] == -torch.inf
