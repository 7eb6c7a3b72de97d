"""LongCat-Video with block-sparse attention: the reference's outputs in one process and on ranks, also where nothing divides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import parameters
from distributed.ranks import run_ranks
from distributed.sparse_ranks import CASES, ODD, every_case, forward, inputs, load_sparse, reference

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(comfyui_here: str) -> Any:
    return load_sparse(comfyui_here).model.diffusion_model


@pytest.fixture(scope="module", params=parameters(plain=[3], campaign=[2, 4, 6]))
def ranks(request: pytest.FixtureRequest, comfyui: Path) -> list[dict[str, Any]]:
    return run_ranks(request.param, every_case, str(comfyui))


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(model: Any, case: str) -> None:
    difference = (forward(model, case) - reference()[f"out.{case}"]).abs().max().item()
    print(f"\n{case}: max abs difference {difference:.2e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference_on_every_rank(ranks: list[dict[str, Any]], case: str) -> None:
    outputs = [torch.from_numpy(seen[case][0]) for seen in ranks]
    difference = (outputs[0] - reference()[f"out.{case}"]).abs().max().item()
    print(f"\n{case} on {len(ranks)} ranks, {ranks[0][case][1]}: max abs difference {difference:.2e}")
    assert difference <= 2e-5
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("case", ODD)
def test_sizes_that_do_not_divide_are_those_of_one_device(model: Any, ranks: list[dict[str, Any]], case: str) -> None:
    """The reference is silently wrong here where frames times ranks divide by four."""
    out = torch.from_numpy(ranks[0][case][0])
    difference = (out - forward(model, case)).abs().max().item()
    print(f"\n{case} on {len(ranks)} ranks, {ranks[0][case][1]}: max abs difference {difference:.2e}")
    assert difference <= 2e-5


def test_dense_is_another_result(model: Any) -> None:
    assert (-model(**inputs("t2v")) - reference()["out.t2v"]).abs().max() > 0.5


def test_a_video_that_is_too_small_is_told(model: Any) -> None:
    from sp_core.errors import SPError

    with pytest.raises(SPError, match=r"keeps no part of a video of 8 x 8 x 8 tokens at a sparsity of 0\.9375"):
        model(**inputs("t2v"), transformer_options={"longcat_block_sparse": {"sparsity": 0.9375}})


def test_a_picture_is_attended_to_whole(model: Any) -> None:
    given = {**inputs("t2v"), "x": inputs("t2v")["x"][:, :, :1]}
    torch.testing.assert_close(model(**given, transformer_options={"longcat_block_sparse": {"sparsity": 0.75}}), model(**given))
