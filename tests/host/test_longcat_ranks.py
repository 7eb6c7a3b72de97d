"""LongCat-Video on 2, 3, 4 and 6 ranks against the reference outputs; ranks bit-identical; what travels, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import parameters
from distributed.longcat_ranks import CASES, every_case, inputs, load, reference
from distributed.ranks import run_ranks

TOLERANCE = 2e-5
DEPTH = 2


@pytest.fixture(scope="module", params=parameters(plain=[3], campaign=[2, 4, 6]))
def ranks(request: pytest.FixtureRequest, comfyui: Path) -> list[dict[str, Any]]:
    return run_ranks(request.param, every_case, str(comfyui))


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference_on_every_rank(ranks: list[dict[str, Any]], case: str) -> None:
    outputs = [torch.from_numpy(seen[case][0]) for seen in ranks]
    expected = reference()[f"out.{case}"]
    assert outputs[0].shape == expected.shape
    error = (outputs[0] - expected).abs().max().item()
    print(f"\n{case} on {len(ranks)} ranks, {ranks[0][case][3]}: max abs difference {error:.2e}")
    assert error <= TOLERANCE
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("case", ["odd size", "three tokens a frame"])
def test_size_never_depends_on_the_device_count(ranks: list[dict[str, Any]], comfyui: Path, case: str) -> None:
    arguments = inputs("i2v" if case == "odd size" else "continuation_cached")
    arguments["x"] = inputs("i2v")["x"][..., :11, :13] if case == "odd size" else inputs("i2v")["x"][..., :2, :6]
    with torch.inference_mode():
        expected = load(str(comfyui)).model.diffusion_model(**arguments)
    for seen in ranks:
        out = torch.from_numpy(seen[case][0])
        assert out.shape == arguments["x"].shape
        assert (out - expected).abs().max() <= TOLERANCE
        assert torch.equal(out, torch.from_numpy(ranks[0][case][0]))


def test_conditioned_keys_travel_once_and_cached_ones_not_at_all(ranks: list[dict[str, Any]]) -> None:
    """Two exchanges a block (q, k, v in, output back) and one gather at the end, conditioned or not."""
    for seen in ranks:
        for case in ("t2v", "i2v", "continuation", "filling", "continuation_cached"):
            assert seen[case][1] == 2 * DEPTH + 1, case
        sent = {case: seen[case][2] for case in seen if case != "cache"}
        assert sent["i2v"] == sent["continuation"] == sent["filling"] == sent["t2v"]
        # half of the frames are conditioning: their tokens are not even in the pass
        assert sent["continuation_cached"] * 2 == sent["t2v"]


def test_cache_holds_own_heads_of_all_conditioning_tokens(ranks: list[dict[str, Any]]) -> None:
    """One cache entry for two equal batch items; 2 frames of 6 x 8 tokens, the rank's share of 4 heads of 32."""
    held = 0
    for seen in ranks:
        entries, (_, tokens, width) = seen["cache"]
        assert entries == 1
        assert tokens in (0, 2 * 6 * 8)  # more ranks than heads: some have none
        held += width
    assert held == 4 * 32
