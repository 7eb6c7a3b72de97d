"""Code of other packs inside the model: equal to stock, or refused by name; never a wrong picture.

Each kind of foreign node has a stand-in (``packs/sp_foreign_nodes``), in front of SP Model Patch and behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from host.boundary import (
    DEVICE_COUNTS,
    EVEN,
    before,
    behind,
    check_sentence,
    copy_checkpoint,
    equal_or_refused,
    named,
    on_wan,
    refusal,
)
from host.graphs import TOLERANCE, Branch, Case, Graph, Link, compare, latent, load, read, relative, run_sp, sample, text

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DEVICES = "cpu:2"

Sample = Callable[[Branch, Link], Link]


def wan(**changes: Any) -> Sample:
    return lambda branch, model: on_wan(branch, model, **changes)


def ltx(start: str, **changes: Any) -> Sample:
    def sampled(branch: Branch, model: Link) -> Link:
        words = text(branch, 48, tokens=16, frame_rate=25.0)
        if ";" not in start:
            words = tuple(branch.add("SPTestTextMask", conditioning=c, hidden=5)[0] for c in words)  # type: ignore[assignment]
        return sample(branch, model, words, latent(branch, start), **changes)

    return sampled


UNGUIDED = wan(cfg=1.0)


@dataclass(frozen=True)
class Kind:
    """A kind of foreign node, and a sampling in which a share of the tokens, heads or rows would not do."""

    label: str
    node: str
    inputs: dict[str, Any] = field(default_factory=dict)
    checkpoint: str = "tiny_wan_t2v"
    sampled: Sample = UNGUIDED
    #: stands in front of SP Model Patch on either side: what the node speaks to
    reader: str | None = None

    def case(self, side: str) -> Case:
        def build(branch: Branch) -> Link:
            model = load(branch, self.checkpoint)
            if self.reader is not None:
                model = branch.add(self.reader, model=model)[0]
            if side == "behind":
                model = branch.patch(model)
            if side != "without":
                model = branch.add(self.node, model=model, **self.inputs)[0]
            return self.sampled(branch, branch.patch(model) if side == "before" else model)

        return named(f"{self.label}_{side}".replace(" ", "_"), build)


KINDS = [
    Kind("mixed heads", "SPForeignHeadMixer"),
    Kind("told by the batch", "SPForeignBatchTelling", sampled=wan(cfg=4.0)),
    Kind("own attention", "SPForeignOwnAttention"),
    Kind("frame score", "SPForeignFrameScore", {"frames": 4}),
    Kind("guided frame score", "SPForeignFrameScore", {"frames": 4}, sampled=wan(cfg=4.0)),
    Kind("token score", "SPForeignTokenScore"),
    Kind("guided token score", "SPForeignTokenScore", sampled=wan(cfg=4.0)),
    Kind("feed-forward", "SPForeignModuleForward", {"module": "ffn"}),
    Kind("cross-attention", "SPForeignModuleForward", {"module": "cross_attn"}),
    Kind("block forward", "SPForeignModuleForward", {"module": ""}),
    Kind("attention patch", "SPForeignAttentionPatch"),
    Kind("bypassed attention", "SPForeignAttentionBypassed", checkpoint="tiny_ltxav", sampled=ltx("1,128,3,4,4;1,8,13,16", cfg=1.0)),
    Kind("wrapped block", "SPForeignBlockWrapper", {"kind": "weaker", "block": 1}),
    Kind("values passed", "SPForeignBlockWrapper", {"kind": "values", "block": 1}, "tiny_ltxv", sampled=ltx("1,128,3,4,4", cfg=1.0)),
    Kind("count kept", "SPForeignCounting", sampled=wan(cfg=1.0, steps=3)),
    Kind("kept in options", "SPForeignKept", sampled=wan(cfg=1.0, steps=3)),
    Kind("swapped forward", "SPForeignForwardSwapped"),
    Kind("swapped blocks", "SPForeignBlocksSwapped", checkpoint="tiny_ltxv", sampled=ltx("1,128,3,4,4", cfg=1.0)),
    Kind("swapped attention", "SPForeignAttentionSwapped"),
    Kind("swapped block forward", "SPForeignBlockForwardSwapped"),
    Kind("object", "SPForeignState", {"closure": False}, reader="SPForeignReadsState"),
    Kind("object with a closure", "SPForeignState", {"closure": True}, reader="SPForeignReadsState"),
]


def on_both_sides(kinds: list[Kind]) -> list[Any]:
    return [pytest.param(kind, side, id=f"{kind.label}-{side}".replace(" ", "_")) for kind in kinds for side in ("before", "behind")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label.replace(" ", "_"))
def test_the_stand_in_changes_the_picture(server: ComfyServer, kind: Kind) -> None:
    """Else equality would show nothing. All of this is stock."""
    parts = {}
    for side in ("without", "before"):
        branch = Branch(Graph())
        samples = kind.case(side)(branch)
        saved = branch.add("SPTestSaveLatent", samples=samples, name=f"foreign-{kind.label}-{side}".replace(" ", "-"))
        parts[side] = read(server.run(branch.graph.prompt)[saved.id]).parts[0]
    assert relative(parts["before"], parts["without"]) > 1e-3


@pytest.mark.parametrize("devices", DEVICE_COUNTS)
@pytest.mark.parametrize(("kind", "side"), on_both_sides(KINDS))
def test_never_a_wrong_picture(server: ComfyServer, kind: Kind, side: str, devices: str) -> None:
    sentence = equal_or_refused(server, kind.case(side), devices)
    print(f"\n{kind.label}, {side}: {sentence or 'equal'}")


#: what must work, where a refusal, however true, is not enough
PROMISED = [
    *("mixed heads", "told by the batch", "own attention", "frame score", "guided frame score", "token score", "guided token score"),
    *("feed-forward", "cross-attention", "block forward", "attention patch", "bypassed attention"),
    *("wrapped block", "values passed", "object", "object with a closure", "count kept", "kept in options"),
]


@pytest.mark.parametrize("devices", DEVICE_COUNTS)
@pytest.mark.parametrize(("kind", "side"), on_both_sides([kind for kind in KINDS if kind.label in PROMISED]))
def test_works(server: ComfyServer, kind: Kind, side: str, devices: str) -> None:
    compare(server, kind.case(side), devices)


# -- classes --------------------------------------------------------------------------------


def with_a_class(server: ComfyServer, name: str, side: str, method: str = "forward_orig") -> Case:
    """A model whose class a pack made of the model's class; of a file of its own, as ComfyUI leaves the class in what branches share."""
    copy_checkpoint(server, name)
    return (before if side == "before" else behind)("SPForeignClass", name, method=method)


def distance_from_stock(server: ComfyServer, case: Case) -> float:
    """SP in a prompt of its own, and first, so that it meets the model as the file has it."""
    mine = run_sp(server, case).parts[0]
    stock = Branch(Graph())
    saved = stock.add("SPTestSaveLatent", samples=case(stock), name=f"{case.__name__}-stock")
    return relative(mine, read(server.run(stock.graph.prompt)[saved.id]).parts[0])


@pytest.mark.parametrize("side", ["before", "behind"])
def test_a_class_that_a_pack_made_is_never_a_wrong_picture(server: ComfyServer, side: str) -> None:
    try:
        error = distance_from_stock(server, with_a_class(server, f"tiny_wan_class_{side}", side))
    except PromptFailed as refused:
        error = 0.0
        check_sentence(str(refused))
    assert error <= TOLERANCE


@pytest.mark.parametrize("method", ["", "forward_orig", "_forward", "forward"])
def test_a_class_that_a_pack_made_works(server: ComfyServer, method: str) -> None:
    """Where the class has code of its own in the forward, one device computes all of it, and the log names it."""
    since, name = len(server.log()), f"tiny_wan_class_{method or 'alone'}"
    case = with_a_class(server, name, "before", method)
    mine = run_sp(server, case)
    said = re.search(r"ForeignWanModel of sp_foreign_nodes.*one device computes all of it", server.log(since))
    assert bool(said) == bool(method)
    # nothing is exchanged then, whatever a forward before it did
    assert ("exchange: 0 a forward" in mine.report) == bool(method), mine.report
    stock = Branch(Graph())
    saved = stock.add("SPTestSaveLatent", samples=case(stock), name=f"{name}-stock")
    assert relative(mine.parts[0], read(server.run(stock.graph.prompt)[saved.id]).parts[0]) <= TOLERANCE


def test_a_class_of_torch_alone_in_the_place_of_the_models_own(server: ComfyServer) -> None:
    copy_checkpoint(server, "tiny_wan_class_of_its_own")
    assert distance_from_stock(server, before("SPForeignClassOfItsOwn", "tiny_wan_class_of_its_own")) <= TOLERANCE


# -- guiders --------------------------------------------------------------------------------


def guided(kind: str, checkpoint: str = "tiny_wan_t2v") -> Case:
    """A guider that wraps blocks of the patched MODEL when it is made."""

    def case(branch: Branch) -> Link:
        model = branch.patch(load(branch, checkpoint))
        words, start = text(branch, 4096), latent(branch, EVEN)
        if checkpoint == "tiny_ltxv":
            plain_words = text(branch, 48, tokens=16, frame_rate=25.0)
            words = tuple(branch.add("SPTestTextMask", conditioning=c, hidden=5)[0] for c in plain_words)  # type: ignore[assignment]
            start = latent(branch, "1,128,3,4,4")
        guider = branch.add("SPForeignGuider", model=model, positive=words[0], negative=words[1], kind=kind, blocks="0,2")[0]
        sigmas = branch.add("BasicScheduler", model=model, scheduler="simple", steps=2, denoise=1.0)[0]
        noise, sampler = branch.add("RandomNoise", noise_seed=5)[0], branch.add("KSamplerSelect", sampler_name="euler")[0]
        return branch.add("SamplerCustomAdvanced", guider=guider, sigmas=sigmas, latent_image=start, noise=noise, sampler=sampler)[0]

    return named(f"guider_{kind}", case)


@pytest.mark.parametrize("devices", DEVICE_COUNTS)
@pytest.mark.parametrize(("kind", "checkpoint"), [("weaker", "tiny_wan_t2v"), ("values", "tiny_ltxv")])
def test_a_guider_that_wraps_blocks(server: ComfyServer, kind: str, checkpoint: str, devices: str) -> None:
    compare(server, guided(kind, checkpoint), devices)


def test_a_guider_whose_wrapper_cannot_travel(server: ComfyServer) -> None:
    sentence = refusal(server, guided("locked"))
    check_sentence(sentence, "SPForeignGuider")
    assert "it.lock is a lock" in sentence


# -- compiled models ------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["before", "behind"])
def test_a_block_that_is_compiled(server: ComfyServer, side: str) -> None:
    # the compiled block stays in the model that branches share, and LoRA loaders find no weights by their names in it
    copy_checkpoint(server, "tiny_wan_compiled")
    kind = Kind("compiled block", "SPForeignCompiledBlock", checkpoint="tiny_wan_compiled")
    sentence = equal_or_refused(server, kind.case(side), DEVICES)
    assert not sentence or side == "behind" or "compile" in sentence, sentence
