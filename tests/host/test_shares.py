"""Unequal shares of the devices, through ComfyUI, against the stock sampler: by what a user names."""

from __future__ import annotations

from typing import Any

import pytest
from campaign import parameters
from host.graphs import SETTINGS, TOLERANCE, Branch, Case, Graph, compare, latent, load, read, relative, sample, text
from host.test_degrees import ltxav, wan

from sp_core.demo.comfy_server import ComfyServer, PromptFailed


def test_named_shares_split_the_tokens_and_not_the_batch(server: ComfyServer) -> None:
    decision = compare(server, wan, "cpu:2", shares="3,1").decision
    assert "2 devices: Ulysses 2, " in decision  # without shares it is CFG 2


def test_equal_shares_are_not_told(server: ComfyServer) -> None:
    assert "shares" not in compare(server, wan, "cpu:2", shares="2,2").decision


def test_sp_sampler_takes_shares(server: ComfyServer) -> None:
    graph = Graph()
    branch = Branch(graph)
    model, (positive, negative), start = load(branch, "tiny_wan_t2v"), text(branch, 4096), latent(branch, "1,16,3,10,14")
    inputs = {**SETTINGS, "devices": "cpu:2", "shares": "3,1"}
    node = branch.add("SPSampler", model=model, positive=positive, negative=negative, latent_image=start, **inputs)
    saved = [
        branch.add("SPTestSaveLatent", samples=sample(branch, model, (positive, negative), start), name="stock").id,
        branch.add("SPTestSaveLatent", samples=node[0], name="sp", report=node[1]).id,
    ]
    outputs = server.run(graph.prompt)
    stock, sp = (read(outputs[node]) for node in saved)
    assert relative(sp.parts[0], stock.parts[0]) <= TOLERANCE
    assert "shares 3:1" in sp.report


@pytest.mark.parametrize(
    ("shares", "message"),
    [("3,1,1", "The shares 3,1,1 are 3 numbers, but there are 2 devices"), ("fast,slow", "'fast,slow' is no value for shares")],
)
def test_shares_that_do_not_fit_the_devices_are_refused(server: ComfyServer, shares: str, message: str) -> None:
    graph = Graph()
    branch = Branch(graph, "cpu:2", {"shares": shares})
    branch.add("SPTestSaveLatent", samples=wan(branch), name="never")
    with pytest.raises(PromptFailed, match=message):
        server.queue(graph.prompt)


#: those on as many devices follow one another, as a pool ends where another list of devices comes
PLAIN: list[tuple[Case, str, dict[str, Any], str]] = [
    (wan, "cpu:2", {"cfg_split": 1, "shares": "3,1"}, "Ulysses 2, "),
    (wan, "cpu:2", {"cfg_split": 1, "ring": 2, "shares": "3,1"}, "ring 2, "),
    (wan, "cpu:2", {"cfg_split": 1, "layout": "tiles", "shares": "1,2"}, "Ulysses 2, tiles "),
    (wan, "cpu:2", {"cfg_split": 2, "shares": "3,1"}, "CFG 2, "),
    (ltxav, "cpu:2", {"cfg_split": 1, "shares": "5,3"}, "Ulysses 2, "),
    (ltxav, "cpu:3", {"layout": "flat", "shares": "2,1,1"}, "Ulysses 3, flat"),
]
SELDOM: list[tuple[Case, str, dict[str, Any], str]] = [
    (wan, "cpu:3", {"cfg_split": 1, "ring": 1, "shares": "2,1,1"}, "Ulysses 3, "),
    (wan, "cpu:3", {"ring": 3, "layout": "tiles", "shares": "5,3,1"}, "ring 3, tiles "),
]


@pytest.mark.parametrize(("case", "devices", "requested", "words"), parameters(plain=PLAIN, campaign=SELDOM), ids=str)
def test_same_as_stock(server: ComfyServer, case: Case, devices: str, requested: dict[str, Any], words: str) -> None:
    made = compare(server, case, devices, **requested)
    assert words in made.decision
    # the halves of the batch are as large, whatever their devices' shares
    told = f"shares {requested['shares'].replace(',', ':')}" in made.decision
    assert told == (requested.get("cfg_split") != 2)
