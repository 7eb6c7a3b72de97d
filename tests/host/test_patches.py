"""The table of docs/patches.md: what other nodes do to a model either equals stock or is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from campaign import parameters
from host.boundary import copy_checkpoint
from host.family_checkpoints import write_families
from host.graphs import Branch, Case, Link, compare, latent, load, run_sp, sample, text
from host.observe import wait_for

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DEVICES = "cpu:2"
WAN_START, HUNYUAN_START = "1,16,3,10,14", "1,16,3,10,14"
SLG = {"scale": 3.0, "start_percent": 0.0, "end_percent": 1.0, "rescaling_scale": 0.2}
CACHE = {"reuse_threshold": 0.9, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}


@pytest.fixture(scope="module", autouse=True)
def checkpoints(comfyui: Path, base: Path) -> None:
    write_families(comfyui, base, ["tiny_hunyuan", "tiny_minimax"])


def on_wan(branch: Branch, wire: Link, start: str = WAN_START, **changes: float) -> Link:
    return sample(branch, wire, text(branch, 4096), latent(branch, start), **changes)


def before(class_type: str, start: str = WAN_START, steps: int = 2, **inputs: object) -> Case:
    """A node of a pack, then SP Model Patch."""

    def case(branch: Branch) -> Link:
        wire = branch.patch(branch.add(class_type, model=load(branch, "tiny_wan_t2v"), **inputs)[0])
        return on_wan(branch, wire, start, steps=steps)

    case.__name__ = f"{class_type}_before"
    return case


def behind(class_type: str, start: str = WAN_START, steps: int = 2, **inputs: object) -> Case:
    def case(branch: Branch) -> Link:
        wire = branch.add(class_type, model=branch.patch(load(branch, "tiny_wan_t2v")), **inputs)[0]
        return on_wan(branch, wire, start, steps=steps)

    case.__name__ = f"{class_type}_behind"
    return case


def hunyuan(label: str, class_type: str, *, first: bool, **inputs: object) -> Case:
    """On HunyuanVideo, in front of SP Model Patch or behind it."""

    def case(branch: Branch) -> Link:
        wire = load(branch, "tiny_hunyuan")
        wire = wire if first else branch.patch(wire)
        wire = branch.add(class_type, model=wire, **inputs)[0]
        wire = branch.patch(wire) if first else wire
        spec = json.dumps({"pooled_output": [1, 768]})
        made = [branch.add("SPTestConditioningTensors", conditioning=c, tensors=spec, seed=i)[0] for i, c in enumerate(text(branch, 64))]
        return sample(branch, wire, (made[0], made[1]), latent(branch, HUNYUAN_START))

    case.__name__ = label
    return case


def fp8_weights(branch: Branch) -> Link:
    """The workers' loader makes the same numbers of them."""
    wire = branch.add("UNETLoader", unet_name="tiny_wan_t2v.safetensors", weight_dtype="fp8_e4m3fn")[0]
    return on_wan(branch, branch.patch(wire))


WINDOWS = {
    "context_length": 13,
    "context_overlap": 4,
    "context_schedule": "standard_static",
    "context_stride": 1,
    "closed_loop": False,
    "fuse_method": "pyramid",
    "freenoise": False,
    "retain_first_frame": False,
    "split_conds_to_windows": False,
}

NAG = hunyuan("NAGuidance_joint", "NAGuidance", first=True, nag_scale=4.0, nag_alpha=0.4, nag_tau=1.5)

WORK: list[Case] = [
    before("SPTestAttentionOverride"),
    before("SPTestHeadChunks"),
    before("SPTestCrossAttentionGuidance"),
    before("SPTestResiduals"),
    before("SPTestBlockSwap"),
    before("SPTestBlockPatch"),
    before("SPTestAttentionPatch", place="attn1_patch"),
    before("SkipLayerGuidanceDiT", double_layers="0, 2", single_layers="", **SLG),
    *(behind(node) for node in ("SPTestAttentionOverride", "SPTestCrossAttentionGuidance", "SPTestResiduals", "SPTestBlockPatch")),
    behind("SPTestEscape", target="blocks.1.self_attn"),
    behind("SPTestSetOption", option="patches"),
    behind("SPTestSetOption", option="attention"),
    *(side("SPTestPatchWhileSampling") for side in (before, behind)),
    behind("SkipLayerGuidanceDiT", double_layers="1", single_layers="", **SLG),
    hunyuan("SkipLayerGuidanceDiT_joint", "SkipLayerGuidanceDiT", first=False, double_layers="0", single_layers="1", **SLG),
    NAG,
    before("WanContextWindowsManual", "1,16,7,6,10", **WINDOWS),
    behind("WanContextWindowsManual", "1,16,7,6,10", **WINDOWS),
    fp8_weights,
]


@pytest.mark.parametrize("case", WORK, ids=lambda case: case.__name__)
def test_equals_stock(server: ComfyServer, case: Case, require: Callable[[Case], None]) -> None:
    require(case)
    compare(server, case, DEVICES, cfg_split=1)


@pytest.mark.parametrize("devices", ["cpu:4"])
def test_chunks_where_heads_do_not_divide(server: ComfyServer, devices: str) -> None:
    """Three heads in groups of one on four ranks: each rank is without a head at times."""
    compare(server, before("SPTestHeadChunks"), devices, cfg_split=1)


@pytest.mark.parametrize("case", [WORK[0], WORK[2], WORK[3], NAG], ids=lambda case: case.__name__)
def test_the_patch_changes_the_picture(server: ComfyServer, case: Case) -> None:
    """Else equality would show nothing."""

    def untouched(branch: Branch) -> Link:
        return on_wan(branch, branch.patch(load(branch, "tiny_wan_t2v")))

    plain = run_sp(server, untouched).parts[0]
    assert (run_sp(server, case).parts[0] - plain).norm() / plain.norm() > 1e-3


def test_blocks_are_swapped_in_the_workers(server: ComfyServer) -> None:
    """A swap that never happened would give the same picture too."""
    # ComfyUI calls no callback for a model whose weights are loaded already, so this one is of a file of its own
    copy_checkpoint(server, "tiny_wan_swapped")

    def case(branch: Branch) -> Link:
        return on_wan(branch, branch.patch(branch.add("SPTestBlockSwap", model=load(branch, "tiny_wan_swapped"))[0]))

    compare(server, case, DEVICES)

    def said() -> set[str]:
        return set(re.findall(r"\[SP rank (\d)\].*SPTestBlockSwap takes over", server.log()))

    # a worker's lines reach the console a moment after its answer
    wait_for(lambda: said() == {"0", "1"}, 5, "both ranks to say that they swap")


def test_guidance_that_compares_conditionings_keeps_them_together(server: ComfyServer, require: Callable[[Case], None]) -> None:
    """Two devices would else take one conditioning each, and the guidance would find nothing to compare."""
    require(NAG)
    comparison = compare(server, NAG, DEVICES)
    assert "CFG" not in comparison.decision
    weaker = hunyuan("weaker", "NAGuidance", first=True, nag_scale=1.0, nag_alpha=0.4, nag_tau=1.5)
    assert (run_sp(server, weaker).parts[0] - comparison.sp.parts[0]).abs().max() > 1e-3, "the guidance did nothing"


@pytest.mark.parametrize(
    ("side", "node"),
    parameters(plain=[(before, "EasyCache"), (behind, "LazyCache")], campaign=[(behind, "EasyCache"), (before, "LazyCache")]),
)
def test_steps_are_skipped_once_for_all(server: ComfyServer, node: str, side: Callable[..., Case], require: Callable[[Case], None]) -> None:
    """The decision falls in ComfyUI's process, so the workers are not asked at all for a step that is left out."""
    case = side(node, steps=8, **CACHE)
    require(case)
    comparison = compare(server, case, DEVICES, cfg_split=1)
    computed = int(re.search(r"forwards: (\d+)", comparison.sp.report).group(1))  # type: ignore[union-attr]
    assert 0 < computed < 8


REFUSED = [
    (before("SPTestForwardReplaced", while_sampling=False), ["forward_orig is replaced"]),
    (behind("SPTestForwardReplaced", while_sampling=False), ["diffusion_model.forward_orig", "SPTestForwardReplaced"]),
    (before("SPTestForwardReplaced", while_sampling=True), ["forward_orig was replaced while sampling", "SPTestForwardReplaced"]),
    (behind("SPTestForwardReplaced", while_sampling=True), ["forward_orig was replaced while sampling", "SPTestForwardReplaced"]),
    *((side("SPTestPatchWhileSampling", locked=True), ["while sampling", "SPTestPatchWhileSampling"]) for side in (before, behind)),
]


@pytest.mark.parametrize(("case", "words"), REFUSED, ids=[f"{case.__name__}-{words[0]}" for case, words in REFUSED])
def test_refused_by_name(server: ComfyServer, case: Case, words: list[str]) -> None:
    with pytest.raises(PromptFailed) as caught:
        run_sp(server, case)
    for word in words:
        assert word in str(caught.value)
