"""Workers that slow down between runs: the shares of the next runs follow, and go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from host.graphs import SETTINGS, TOLERANCE, Branch, Graph, latent, load, read, relative, sample, text

from sp_core import settings
from sp_core.demo.comfy_server import ComfyServer


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says which ranks are slowed down; there is none at first."""
    return tmp_path_factory.mktemp("slowed") / "ranks"


@pytest.fixture(scope="module")
def own_environment(slowed: Path) -> dict[str, str]:
    return {settings.SLOWED: str(slowed)}


def _run(server: ComfyServer, seed: int) -> tuple[float, str]:
    graph = Graph()
    branch = Branch(graph)
    model, (positive, negative), start = load(branch, "tiny_wan_t2v"), text(branch, 4096), latent(branch, "1,16,3,30,44")
    inputs: dict[str, Any] = {**SETTINGS, "seed": seed, "cfg": 1.0, "devices": "cpu:2"}
    node = branch.add("SPSampler", model=model, positive=positive, negative=negative, latent_image=start, **inputs)
    saved = [
        branch.add("SPTestSaveLatent", samples=sample(branch, model, (positive, negative), start, seed=seed, cfg=1.0), name="stock").id,
        branch.add("SPTestSaveLatent", samples=node[0], name="sp", report=node[1]).id,
    ]
    outputs = server.run(graph.prompt)
    stock, sp = (read(outputs[node]) for node in saved)
    return relative(sp.parts[0], stock.parts[0]), sp.report


def test_shares_follow_a_rank_that_slows_down_and_recovers(own: ComfyServer, slowed: Path) -> None:
    reports = []
    for seed, ranks in enumerate(["", "1:6", "1:6", "1:6", "", "", ""]):
        slowed.write_text(ranks)
        error, report = _run(own, seed)
        print(f"\nslowed '{ranks}': relative L2 {error:.2g}; {report.splitlines()[1]}")
        assert error <= TOLERANCE
        reports.append(report)
    # what a run is found to take counts from the next run on
    assert "shares 100:" in reports[3]
    assert "shares 100:" in reports[2]
    assert "shares 100:1" not in reports[6] and "shares 100:2" not in reports[6]
