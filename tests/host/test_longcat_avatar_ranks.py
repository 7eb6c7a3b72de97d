"""LongCat-Video-Avatar on 2, 3, 4 and 6 ranks against the reference outputs; ranks bit-identical; what travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import parameters
from distributed.avatar_ranks import CACHED, FORWARDS, every_case, expected, guided
from distributed.ranks import run_ranks

TOLERANCE = 2e-5
DEPTH = 2


@pytest.fixture(scope="module", params=parameters(plain=[3], campaign=[2, 4, 6]))
def ranks(request: pytest.FixtureRequest, comfyui: Path) -> list[dict[str, Any]]:
    return run_ranks(request.param, every_case, str(comfyui))


@pytest.mark.parametrize("case", [*FORWARDS, *CACHED])
def test_equals_the_reference_on_every_rank(ranks: list[dict[str, Any]], case: str) -> None:
    outputs = [torch.from_numpy(seen[case][0]) for seen in ranks]
    difference = (outputs[0] - expected(case)).abs().max().item()
    print(f"\n{case} on {len(ranks)} ranks, {ranks[0][case][2]}: max abs difference {difference:.2e}")
    assert difference <= TOLERANCE
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("kind", ["at2v", "ai2v", "ai2v_two", "avc", "avc_two"])
def test_three_branches(ranks: list[dict[str, Any]], kind: str) -> None:
    outputs = {case: torch.from_numpy(seen[0]) for case, seen in ranks[0].items()}
    assert (guided(outputs, kind) - expected(f"{kind}.guided")).abs().max() <= TOLERANCE


def test_what_travels(ranks: list[dict[str, Any]]) -> None:
    """Two exchanges a block, however frames attend; people add one for their wider values and one for their extremes."""
    for seen in ranks:
        for case in ("at2v.cond", "ai2v.cond", "avc.cond", "avc_cached.cond"):
            assert seen[case][1] == 2 * DEPTH + 1, case
        for case in ("ai2v_two.cond", "avc_two.cond", "avc_three_cached.cond"):
            assert seen[case][1] == 4 * DEPTH + 1, case
