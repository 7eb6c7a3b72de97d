"""What cannot be honoured is refused with a sentence that says what to do; nothing is ever dropped, and the queue goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from host.graphs import Branch, Case, Graph, Link, compare, latent, load, run_sp, sample, text

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DEVICES = "cpu:2"
SHAPE = "1,16,3,10,14"


@pytest.fixture(scope="module", autouse=True)
def begin(server: ComfyServer) -> int:
    """Length of the server's log when this module begins."""
    return len(server.log())


def sampled(branch: Branch, wire: Link) -> Link:
    return sample(branch, wire, text(branch, 4096), latent(branch, SHAPE))


def plain(branch: Branch) -> Link:
    return sampled(branch, branch.patch(load(branch, "tiny_wan_t2v")))


def behind(class_type: str, **inputs: object) -> Case:
    """A node that changes the model, behind SP Model Patch."""

    def case(branch: Branch) -> Link:
        return sampled(branch, branch.add(class_type, model=branch.patch(load(branch, "tiny_wan_t2v")), **inputs)[0])

    case.__name__ = f"{class_type}_behind"
    return case


def before(class_type: str, **inputs: object) -> Case:
    def case(branch: Branch) -> Link:
        return sampled(branch, branch.patch(branch.add(class_type, model=load(branch, "tiny_wan_t2v"), **inputs)[0]))

    case.__name__ = f"{class_type}_before"
    return case


def failure(server: ComfyServer, case: Case, devices: str = DEVICES) -> str:
    """The sentence that the failing prompt shows."""
    with pytest.raises(PromptFailed) as caught:
        run_sp(server, case, devices)
    return str(caught.value)


# -- behind SP Model Patch, where only the workers could honour it -------------------------

LATE = [
    behind("LoraLoaderModelOnly", lora_name="tiny_wan_lora.safetensors", strength_model=1.0),
    behind("SPTestWeightPatch", key="diffusion_model.blocks.0.ffn.0.weight"),
    behind("SPForeignBlockWrapper", kind="locked", block=1),
    behind("SPTestObjectPatch", name="diffusion_model.blocks.0.ffn"),
    behind("LoraLoaderBypassModelOnly", lora_name="tiny_wan_lora.safetensors", strength_model=1.0),
]


@pytest.mark.parametrize("case", LATE, ids=lambda case: case.__name__)
def test_too_late_is_refused_by_the_name_of_the_node(server: ComfyServer, case: Case, require: Callable[[Case], None]) -> None:
    require(case)
    message = failure(server, case)
    assert re.search(rf"Place SP Model Patch after {case.__name__.removesuffix('_behind')} \(node \d+\)", message), message


def test_options_written_without_the_patchers_methods(server: ComfyServer) -> None:
    """No method of the patcher saw the node, so the message names what it added and the pack that did."""
    message = failure(server, behind("SPTestSetOption", option="locked"))
    assert "Place SP Model Patch after" in message
    assert "patches.double_block" in message
    assert "sp_test_nodes" in message
    assert "it's lock is a lock" in message


def test_a_merge_that_reads_its_weights(server: ComfyServer) -> None:
    def merge(branch: Branch) -> Link:
        parts = {"model1": load(branch, "tiny_wan_t2v_low"), "model2": branch.patch(load(branch, "tiny_wan_t2v"))}
        return sampled(branch, branch.add("ModelMergeSimple", ratio=0.3, **parts)[0])

    assert "Place SP Model Patch after ModelMergeSimple" in failure(server, merge)


def test_an_object_patch_of_what_runs_here_is_no_problem(server: ComfyServer) -> None:
    compare(server, behind("SPTestObjectPatch", name="model_sampling"), DEVICES)


# -- before SP Model Patch ------------------------------------------------------------------


@pytest.mark.parametrize("target", ["blocks.1.self_attn", "blocks.0"])
def test_a_forward_that_never_calls_the_hosts_attention(server: ComfyServer, target: str) -> None:
    """It is given the whole video, and both the log and the report say what that costs."""
    comparison = compare(server, before("SPTestEscape", target=target), DEVICES)
    assert re.search(r"SPTestEscape.* of sp_test_nodes.*computes it in full", comparison.sp.report), comparison.sp.report


def test_a_weight_patch_before_it_works(server: ComfyServer) -> None:
    compare(server, before("SPTestWeightPatch", key="diffusion_model.blocks.0.ffn.0.weight"), DEVICES)


# -- input that is refused before anything runs ----------------------------------------------


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ("cpu:0", "0 CPU workers"),
        ("cpu:17", "17 CPU workers"),
        ("cpu:", "no device list"),
        ("gpu", "no device list"),
        ("0,,1", "no device list"),
        ("97,98", "does not exist"),
        ("", "no device list"),
    ],
)
def test_device_strings(server: ComfyServer, devices: str, why: str) -> None:
    graph = Graph()
    branch = Branch(graph, devices)
    branch.add("SPTestSaveLatent", samples=plain(branch), name="refused")
    with pytest.raises(PromptFailed) as caught:
        server.queue(graph.prompt)
    message = str(caught.value)
    assert "SPModelPatch" in message
    assert why in message
    assert "cpu:1 to cpu:16" in message


def patched_twice(**second: object) -> Case:
    def twice(branch: Branch) -> Link:
        wire = branch.patch(load(branch, "tiny_wan_t2v"))
        return sampled(branch, branch.add("SPModelPatch", model=wire, **second)[0])

    return twice


def test_two_patches_that_differ(server: ComfyServer) -> None:
    assert "other devices" in failure(server, patched_twice(devices="cpu:3"))
    for setting in ({"cfg_split": 1}, {"layout": "tiles"}, {"keep_loaded": "never"}):
        assert "other settings" in failure(server, patched_twice(devices=DEVICES, **setting))


def test_two_equal_patches_are_one(server: ComfyServer) -> None:
    def twice(branch: Branch) -> Link:
        return sampled(branch, branch.patch(branch.patch(load(branch, "tiny_wan_t2v"))))

    compare(server, twice, DEVICES)


# -- trouble in a worker ---------------------------------------------------------------------


@pytest.fixture
def fleeting(base: Path) -> Path:
    return base / "models" / "diffusion_models" / "tiny_wan_fleeting.safetensors"


def test_a_checkpoint_that_is_missing_in_the_worker(server: ComfyServer, fleeting: Path) -> None:
    def missing(branch: Branch) -> Link:
        # the file goes away after this process has loaded it and before the workers look for it
        wire = branch.add("SPTestMoveFile", model=load(branch, "tiny_wan_fleeting"), path=str(fleeting))[0]
        return sampled(branch, branch.patch(wire))

    message = failure(server, missing)
    assert not fleeting.exists()
    assert re.search(r"Rank \d failed", message), message
    assert "UNETLoader (node 1)" in message
    assert "tiny_wan_fleeting" in message
    assert "Traceback" not in message
    compare(server, plain, DEVICES)


def test_the_queue_goes_on(server: ComfyServer, begin: int) -> None:
    """After every refusal of this module the same workers still compute the right picture."""
    compare(server, plain, DEVICES)
    assert len(re.findall("workers joined", server.log(begin))) <= 2
