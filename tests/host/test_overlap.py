"""Exchange beside attention in a real ComfyUI: the stock picture, and faults in the middle of a group of heads."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import parameters
from host.graphs import Branch, Case, Graph, Link, compare, latent, load, sample, text
from host.observe import failure, run, wait_for, workers
from host.test_ltx import STRENGTHS, guides

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DEVICES = "cpu:2"
TIMEOUT_S = 10
TOLD = "exchange beside attention in 2 groups of heads"


@pytest.fixture(scope="module")
def own(comfyui: Path, base: Path) -> Iterator[ComfyServer]:
    # the faults are an attention function of a test; trusted, it is shared out as the host's is
    environment = {"SP_HEAD_GROUPS": "2", "SP_VERIFY_RANKS": "1", "SP_TRUST_PATCHES": "1", "SP_TIMEOUT_S": str(TIMEOUT_S)}
    with ComfyServer(comfyui, base, "--cpu", environment=environment) as server:
        yield server


def ltxav(branch: Branch) -> Link:
    """4 heads, so 2 on each rank; audio takes part in what is replicated."""
    return sample(branch, branch.patch(load(branch, "tiny_ltxav")), text(branch, 96), latent(branch, "1,128,3,5,11;1,8,9,16"))


@pytest.mark.parametrize("case", [ltxav, guides("tiny_ltxav", "strengths", STRENGTHS, audio=True)], ids=["plain", "guides"])
@pytest.mark.parametrize("layout", ["flat", "tiles"])
def test_groups_of_heads_give_the_stock_picture(own: ComfyServer, case: Case, layout: str) -> None:
    # the halves of a batch exchange nothing, so the sequence is what is split
    made = compare(own, case, DEVICES, cfg_split=1, ring=1, layout=layout)
    assert TOLD in made.sp.report, made.sp.report
    assert "nothing beside the exchange of attention of replicated queries, which are few" in made.sp.report, made.sp.report


@pytest.mark.campaign
def test_a_ring_says_why_it_has_no_groups(own: ComfyServer) -> None:
    made = compare(own, ltxav, "cpu:4", cfg_split=1, ring=2)
    assert "no exchange beside attention: the ring passes keys and values on meanwhile" in made.sp.report, made.sp.report


def prompt(devices: str | None, change: Callable[[Branch, Link], Link] = lambda branch, wire: wire, **settings: Any) -> tuple[dict, str]:
    """A prompt of :func:`ltxav`, and the id of the node that saves it."""
    branch = Branch(Graph(), devices, {} if devices is None else {"cfg_split": 1})
    wire = branch.patch(change(branch, load(branch, "tiny_ltxav")))
    samples = sample(branch, wire, text(branch, 96), latent(branch, "1,128,3,5,11;1,8,9,16"), **settings)
    return branch.graph.prompt, branch.add("SPTestSaveLatent", samples=samples, name=f"overlap-{time.monotonic_ns()}").id


def works(server: ComfyServer) -> None:
    stock, shared = (run(server, *prompt(devices)).parts[0] for devices in (None, DEVICES))
    torch.testing.assert_close(shared, stock, rtol=0, atol=2e-4)


FAULTS = [
    ("error", 0, "Rank 0 failed: a fault that a test put there"),
    ("exit", 1, r"The worker of rank 1 ended unexpectedly \(exit code 7"),
    ("hang", 1, f"Rank 1 made no progress for {TIMEOUT_S} s while computing a forward of LTXAVModel"),
]


@pytest.mark.parametrize(("kind", "rank", "sentence"), parameters(plain=FAULTS[:1], campaign=FAULTS[1:]), ids=[kind for kind, *_ in FAULTS])
def test_a_rank_fails_in_the_second_group(own: ComfyServer, kind: str, rank: int, sentence: str) -> None:
    def fault(branch: Branch, wire: Link) -> Link:
        # the second call of the attention function: the first block's second group
        return branch.add("SPTestFault", model=wire, rank=rank, call=1, kind=kind)[0]

    works(own)
    said, seconds = failure(own, own.queue(prompt(DEVICES, fault, seed=time.monotonic_ns() % 10**9)[0]))
    print(f"\n{kind}: {seconds:.1f} s: {said}")
    assert re.search(sentence, said), said
    works(own)


def test_a_cancel_leaves_nothing_under_way(own: ComfyServer) -> None:
    works(own)
    before = [worker["pid"] for worker in workers(own)]
    prompt_id = own.queue(prompt(DEVICES, seed=time.monotonic_ns() % 10**9, steps=2000)[0])
    wait_for(lambda: any(worker["phase"] == "computing" for worker in workers(own)), 60, "a rank to compute")
    own.post("/interrupt", {})
    with pytest.raises(PromptFailed, match="interrupted"):
        own.wait(prompt_id)
    works(own)
    assert [worker["pid"] for worker in workers(own)] == before, "the workers did not survive a cancel"
