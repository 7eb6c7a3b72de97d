"""Compile nodes through a real ComfyUI: the workers compile the blocks, and the picture is that of the uncompiled model.

The stock branch is not compiled: that would take its minute and change nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign import parameters
from distributed.longcat_ranks import FIXTURE
from host.boundary import LORA, copy_checkpoint, named, on_wan
from host.graphs import Branch, Case, Graph, Link, compare, load, run_sp, save
from host.observe import pids, wait_for, workers
from host.test_cancel import BOUND_S, cancel
from host.test_longcat_server import image_to_video as longcat_picture
from host.test_longcat_server import text_to_video as longcat_text
from host.test_ltx import BOTH, STRENGTHS, VIDEO, guides, plain
from host.test_more_models import sampled
from host.test_wan import frame_timesteps, two_videos_with_a_ramp

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

Compile = Callable[[Branch, Link], Link]
#: all ranks share the tokens, which two devices would not by themselves
SPLIT = {"cfg_split": 1}


def compile_node(class_type: str = "SPForeignCompile", **inputs: Any) -> Compile:
    return lambda branch, model: branch.add(class_type, model=model, **inputs)[0]


def wan(branch: Branch, start: str = "1,16,3,10,14", lora: bool = False, fault_on: int | None = None) -> Link:
    model = load(branch, "tiny_wan_to_compile")
    if lora:
        model = branch.add("LoraLoaderModelOnly", model=model, **LORA)[0]
    if fault_on is not None:
        # an attention function of a pack, which fails on that rank
        model = branch.add("SPTestFault", model=model, rank=fault_on, call=2, kind="error")[0]
    return on_wan(branch, branch.patch(model), start)


def compiled(case: Case, side: str = "before", node: Compile | None = None) -> Case:
    """The case with a compile node beside its SP Model Patch, where it has one."""
    ask = node or compile_node()

    def asked(branch: Branch) -> Link:
        if branch.devices is not None:
            patch = branch.patch
            before, behind = (ask if side == at else lambda branch, model: model for at in ("before", "behind"))

            def with_node(model: Link) -> Link:
                branch.patched.append(behind(branch, patch(before(branch, model))))
                return branch.patched[-1]

            branch.patch = with_node  # type: ignore[method-assign]
        return case(branch)

    return named(f"compiled_{side}_{case.__name__}", asked)


def told(report: str) -> str:
    """The report's line about compiling."""
    [found] = [line for line in report.splitlines() if line.startswith("torch.compile")]
    print(found)
    return found


def exchanges(report: str) -> int:
    return int(re.search(r"exchange: (\d+) a forward", report)[1])  # type: ignore[index]


#: the whole model; its blocks, as KJNodes' nodes ask; what ComfyUI's own node asks; what older nodes put in the place of a block
WHOLE, BLOCKS = compile_node(), compile_node(keys="diffusion_model.blocks.0,diffusion_model.blocks.1,diffusion_model.blocks.2")
STOCK, OLDER = compile_node("TorchCompileModel", backend="inductor"), compile_node("SPForeignCompiledBlock")


@pytest.mark.parametrize(
    ("side", "node", "devices"),
    parameters(
        plain=[("before", WHOLE, "cpu:2"), ("behind", BLOCKS, "cpu:2")],
        campaign=[
            *((side, node, "cpu:3") for side in ("before", "behind") for node in (WHOLE, BLOCKS)),
            *((side, node, "cpu:2") for side in ("before", "behind") for node in (STOCK, OLDER)),
            ("before", WHOLE, "cpu:4"),
        ],
    ),
)
def test_blocks_are_compiled_in_the_workers(server: ComfyServer, side: str, node: Compile, devices: str) -> None:
    # a compiled block stays in the model that branches share
    copy_checkpoint(server, "tiny_wan_to_compile")
    comparison = compare(server, compiled(wan, side, node), devices, **SPLIT)
    assert re.match(r"torch.compile \((aot_eager|eager|inductor)\): \d+ graphs? in [\d.]+ s$", told(comparison.sp.report))
    # in and out in each of three blocks, and the gather
    assert exchanges(comparison.sp.report) == 7


COMPILED = r"torch.compile \(aot_eager\): [1-9]\d* graphs? in [\d.]+ s$"
#: whose attention has an object for a mask in every forward, or in those of a prompt
HELD = r"torch.compile \(aot_eager\): .*; not compiled: the attention has an object for a mask|: not compiled: the attention has an object"


@pytest.mark.campaign
@pytest.mark.parametrize("devices", ["cpu:2", "cpu:3"])
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (frame_timesteps("ramp", two_videos_with_a_ramp), COMPILED),
        (plain("tiny_ltxv", VIDEO), COMPILED),
        (plain("tiny_ltxav", BOTH), COMPILED),
        (plain("tiny_ltx23", BOTH), COMPILED),
        (guides("tiny_ltxv", "strengths", STRENGTHS), HELD),
        (longcat_text, COMPILED),
        (longcat_picture, HELD),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_models(server: ComfyServer, case: Case, expected: str, devices: str) -> None:
    shutil.copy(FIXTURE, server.base / "models" / "diffusion_models" / "longcat_tiny.safetensors")
    comparison = compare(server, compiled(case), devices, **SPLIT)
    assert re.search(expected, told(comparison.sp.report))


def test_what_cannot_be_compiled_says_why(server: ComfyServer) -> None:
    copy_checkpoint(server, "tiny_wan_to_compile")
    graphs = compare(server, compiled(wan, node=compile_node(backend="cudagraphs")), "cpu:2", **SPLIT)
    assert "CUDA graphs cannot hold an exchange" in told(graphs.sp.report)
    assert "go round a ring" in told(compare(server, compiled(wan), "cpu:2", ring=2, ulysses=1).sp.report)


def test_nothing_is_compiled_again_where_nothing_changed(server: ComfyServer) -> None:
    """A LoRA, a size that was seen before, a model that was away, and ranks that failed find the graphs that there are."""

    copy_checkpoint(server, "tiny_wan_to_compile")

    def graphs(**changes: Any) -> int:
        case = compiled(named("again", lambda branch: wan(branch, **changes)))
        return int(re.search(r": (\d+) graph", told(run_sp(server, case, "cpu:2", **SPLIT).report))[1])  # type: ignore[index]

    first = graphs()
    assert graphs(lora=True) == first
    other = graphs(start="1,16,4,6,10")
    assert other <= first + 1, "one graph for all sizes"
    assert graphs(start="1,16,5,8,8") == other
    with pytest.raises(PromptFailed, match="a fault that a test put there"):
        graphs(fault_on=1)
    assert graphs() == other
    server.post("/free", {"unload_models": True, "free_memory": True})
    assert graphs() == other


@pytest.mark.campaign
def test_another_layout_and_cfg_halves_and_back(server: ComfyServer) -> None:
    copy_checkpoint(server, "tiny_wan_to_compile")

    def graphs(**requested: Any) -> int:
        line = told(compare(server, compiled(wan), "cpu:4", ring=1, **requested).sp.report)
        assert re.search(COMPILED, line)
        return int(re.search(r": (\d+) graph", line)[1])  # type: ignore[index]

    ways: list[dict[str, Any]] = [{"cfg_split": 1, "layout": "flat"}, {"cfg_split": 1, "layout": "tiles"}, {"cfg_split": 2}]
    *_, last = [graphs(**way) for way in ways]
    assert last <= 3, "one kind of blocks"
    assert [graphs(**way) for way in ways] == [last] * len(ways), "compiled again"


@pytest.mark.campaign
@pytest.mark.parametrize("devices", ["cpu:2", "cpu:3"])
def test_an_attention_function_of_another_pack_runs_inside(server: ComfyServer, devices: str) -> None:
    copy_checkpoint(server, "tiny_wan_to_compile")
    case = compiled(named("attention_function", lambda branch: wan(branch, fault_on=9)))
    assert re.search(COMPILED, told(compare(server, case, devices, **SPLIT).sp.report))


#: attentions that are modules of a block, and blocks that attend themselves
@pytest.mark.parametrize("case", [wan, sampled("flux")], ids=lambda case: case.__name__)
def test_where_one_rank_fails_to_compile_no_rank_runs_compiled(server: ComfyServer, case: Case) -> None:
    copy_checkpoint(server, "tiny_wan_to_compile")
    comparison = compare(server, compiled(case, node=compile_node("SPForeignBackend", fails_on=1)), "cpu:2", **SPLIT)
    assert "sp_foreign_failing: a fault of the backend (on rank 1)" in told(comparison.sp.report)
    assert "not split" not in comparison.decision


def test_cancel_while_the_workers_compile(server: ComfyServer, tmp_path: Path) -> None:
    """The user need not wait for the graph; the next prompt finds it, and workers that are in step."""
    copy_checkpoint(server, "tiny_wan_to_compile")
    gate = tmp_path / "open"
    case = compiled(wan, node=compile_node("SPForeignBackend", until=str(gate)))
    graph = Graph()
    save(Branch(graph, "cpu:2", dict(SPLIT)), case, "cancelled")
    prompt_id = server.queue(graph.prompt)
    try:
        wait_for(lambda: any(worker["phase"] == "compiling" for worker in workers(server)), 60, "the workers to compile")
        before = pids(server)
        # the gate is shut: a cancel that waited for the graph would not come back
        print(f"\ncancel while compiling: {(seconds := cancel(server, prompt_id)):.2f} s")
        assert seconds < BOUND_S
    finally:
        gate.touch()
    assert re.match(r"torch.compile \(sp_foreign_slow\): \d+ graphs? in [\d.]+ s$", told(compare(server, case, "cpu:2", **SPLIT).sp.report))
    assert pids(server) == before
