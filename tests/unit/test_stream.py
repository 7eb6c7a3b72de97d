"""This rank's part of what a block is given, on one dim of tokens and on several, and of what a ControlNet adds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sp_core.errors import SPError
from sp_core.layout import FlatLayout, TileLayout
from sp_core.plans import Blocks
from sp_core.plans.arguments import Arguments
from sp_core.plans.forward_state import ForwardState
from sp_core.plans.stream import as_the_model_had, grid_of, keep_own, shard_residuals


def states(layout: FlatLayout | TileLayout) -> list[ForwardState]:
    found = [ForwardState(rank, layout.world_size) for rank in range(layout.world_size)]
    for state in found:
        state.split_by(layout)
    return found


@pytest.mark.parametrize("dim", [0, 1])
def test_a_grid_of_tokens(dim: int) -> None:
    """(B, F, H, W, C), or (F, H, W, B, C): each rank's tokens are so many frames of one place, and gathered they are the grid again."""
    blocks = Blocks("blocks", "x", (), dim=dim, dims=3)
    tokens = torch.arange(2 * 3 * 5 * 4.0).reshape((3, 5, 4, 2, 1) if dim == 0 else (2, 3, 5, 4, 1))
    assert grid_of(blocks, tokens) == (3, 5, 4)
    parts = []
    for state in states(FlatLayout(60, 7)):
        call = Arguments(["x"], (tokens,), {})
        keep_own(blocks, call, state, first=True)
        own = call.get("x")
        assert own.shape[dim : dim + 3] == (state.layout.counts[state.rank], 1, 1)
        keep_own(blocks, call, state, first=False)
        assert call.get("x") is own, "later blocks are given their own tokens already"
        parts.append(own)
    assert torch.equal(as_the_model_had(torch.cat(parts, dim), dim, (3, 5, 4)), tokens)


def test_a_block_that_was_given_another_number_of_tokens() -> None:
    call = Arguments(["x"], (torch.ones(2, 9, 1, 1, 1),), {})
    with pytest.raises(SPError, match="rank 0 owns 8 of 60 tokens but a block was given 9"):
        keep_own(Blocks("blocks", "x", (), dims=3), call, states(FlatLayout(60, 8))[0], first=False)


def test_residuals_of_the_first_tokens() -> None:
    """Flux with reference latents: a ControlNet adds to the picture, whose tokens are the first ones."""
    plan = SimpleNamespace(architecture="Flux", residuals=("control",))
    added = torch.arange(20.0).reshape(1, 20, 1)
    parts = []
    for state in states(FlatLayout(30, 4)):
        inputs = {"control": {"input": [added, None]}}
        shard_residuals(plan, inputs, state)  # type: ignore[arg-type]
        assert inputs["control"]["input"][1] is None
        parts.append(inputs["control"]["input"][0])
    assert [part.size(1) for part in parts] == [8, 8, 4, 0] and torch.equal(torch.cat(parts, 1), added)


@pytest.mark.parametrize("layout", [FlatLayout(30, 4), TileLayout((2, 5, 3), (1, 3))])
def test_residuals_that_do_not_fit(layout: FlatLayout | TileLayout) -> None:
    plan = SimpleNamespace(architecture="Flux", residuals=("control",))
    tokens = 31 if isinstance(layout, FlatLayout) else 20
    with pytest.raises(SPError, match=r"Flux: the residuals of a ControlNet \(control, input\) do not fit"):
        shard_residuals(plan, {"control": {"input": [torch.ones(1, tokens, 1)]}}, states(layout)[0])  # type: ignore[arg-type]
