"""Unknown code inside the model is probed in the first step: harmless code is shared out from then on, harmful code stays whole.

And with the probe turned off, the pictures of harmful code would be wrong.
"""

from __future__ import annotations

import re

import pytest
from host.boundary import DEVICE_COUNTS, named
from host.graphs import Branch, Comparison, Link, compare, load
from host.test_boundary_foreign import KINDS, Kind, Sample, wan

from sp_core.demo.comfy_server import ComfyServer

STEPS = 4
SHARED = "keeps its parts apart, so it is shared out between the devices"
IN_FULL = "every device computes it in full"
LONGER = wan(cfg=1.0, steps=STEPS)
#: with the name of the function, as the report has it
HARMLESS = [
    (Kind("sharper heads", "SPForeignSharperHeads", sampled=LONGER), "sharper"),
    (Kind("chunks", "SPForeignChunks", {"chunks": 3}, sampled=LONGER), "_in_chunks"),
    (Kind("stronger text", "SPForeignStrongerText", sampled=LONGER), "_stronger"),
    (Kind("output scaled", "SPForeignOutputScaled", sampled=LONGER), "SPForeignOutputScaled"),
    (Kind("guided chunks", "SPForeignChunks", {"chunks": 3}, sampled=wan(cfg=4.0, steps=STEPS)), "_in_chunks"),
]
HARMFUL = [
    (Kind("mixed heads, longer", "SPForeignHeadMixer", sampled=LONGER), "mix_heads"),
    (Kind("feed-forward, longer", "SPForeignModuleForward", {"module": "ffn"}, sampled=LONGER), "_and_the_mean"),
    (Kind("late heads", "SPForeignLateHeads", sampled=LONGER), "SPForeignLateHeads"),
    (Kind("late mean", "SPForeignLateMean", sampled=LONGER), "_late"),
    (Kind("attention patch, longer", "SPForeignAttentionPatch", sampled=LONGER), "SPForeignAttentionPatch"),
]


def said(comparison: Comparison, function: str) -> str:
    [line] = [line for line in comparison.sp.report.splitlines() if function in line and "runs inside the model" in line]
    return line


def exchanges(comparison: Comparison) -> int:
    found = re.search(r"exchange: (\d+) a forward", comparison.sp.report)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("devices", DEVICE_COUNTS)
@pytest.mark.parametrize(("kind", "function"), HARMLESS, ids=[kind.label for kind, _ in HARMLESS])
def test_harmless_code_is_shared_out(server: ComfyServer, kind: Kind, function: str, devices: str) -> None:
    comparison = compare(server, kind.case("before"), devices)
    assert SHARED in said(comparison, function), comparison.sp.report


@pytest.mark.parametrize("devices", DEVICE_COUNTS)
@pytest.mark.parametrize(("kind", "function"), HARMFUL, ids=[kind.label for kind, _ in HARMFUL])
def test_harmful_code_stays_whole(server: ComfyServer, kind: Kind, function: str, devices: str) -> None:
    comparison = compare(server, kind.case("before"), devices)
    assert IN_FULL in said(comparison, function), comparison.sp.report


@pytest.mark.campaign
def test_from_the_second_step_on_harmless_code_exchanges_no_more_than_the_model(server: ComfyServer) -> None:
    """An exchange for the agreement behind each forward is left, and the probe's, which many steps share."""
    counts = {}
    for label, node in (("none", None), ("harmless", "SPForeignSharperHeads"), ("harmful", "SPForeignHeadMixer")):
        sampled = wan(cfg=1.0, steps=20)

        def case(branch: Branch, node: str | None = node, sampled: Sample = sampled) -> Link:
            model = load(branch, "tiny_wan_t2v")
            return sampled(branch, branch.patch(model if node is None else branch.add(node, model=model)[0]))

        counts[label] = exchanges(compare(server, named(f"counted_{label}", case), "cpu:2"))
    print(counts)
    assert counts["none"] <= counts["harmless"] <= counts["none"] + 2 < counts["harmful"]


# -- turned off -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_environment() -> dict[str, str]:
    return {"SP_TRUST_PATCHES": "1"}


#: these are right through whole data, or through all rows on each rank. Values that a block passes on need neither
WHOLE = [
    *("mixed heads", "told by the batch", "own attention", "frame score", "guided frame score", "token score", "guided token score"),
    *("feed-forward", "cross-attention", "block forward", "attention patch", "bypassed attention", "wrapped block"),
]


@pytest.mark.campaign
@pytest.mark.parametrize("label", WHOLE)
def test_trusted_it_would_be_wrong(own: ComfyServer, label: str) -> None:
    kind = {kind.label: kind for kind in KINDS}[label]
    # with a prompt a rank there would be frames to score on each
    requested = {"ulysses": 2} if label.startswith("guided") else {}
    comparison = compare(own, kind.case("before"), "cpu:2", check=False, **requested)
    assert max(comparison.errors) > 1e-3
