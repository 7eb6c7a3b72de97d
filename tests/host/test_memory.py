"""The workers' weights are the host's memory: given back when it asks, brought back by the next sampling."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from campaign import parameters
from host.graphs import Branch, Graph, Link, latent, load, read, sample, text
from host.observe import alive, count, holds_within, pids, run, status, video, wait_for, workers

from sp_core.demo.comfy_server import ComfyServer

DEVICES = "cpu:2"
MODELS = ("tiny_wan_t2v", "tiny_wan_t2v_low")


def demand(branch: Branch, samples: Link) -> Link:
    return branch.add("SPTestMemoryDemand", samples=samples, megabytes=64, all=True)[0]


def held(server: ComfyServer) -> list[int]:
    return [worker["weight_bytes"] for worker in workers(server)]


def press_unload(server: ComfyServer, body: dict[str, bool] | None = None) -> None:
    """The unload button, until it is heard: the host sleeps through a press that falls just before it begins to wait."""
    for _ in range(5):
        server.post("/free", body or {"unload_models": True})
        if holds_within(lambda: held(server) == [0, 0], 4):
            return
    raise AssertionError(f"the workers hold {held(server)} bytes after the unload button")


def test_weights_leave_before_a_demand_and_come_back(own: ComfyServer) -> None:
    """Two models take turns; each is followed by a memory demand like a VAE decode's."""
    expected = {name: run(own, *video(None, name)).parts[0] for name in MODELS}
    sizes: list[int] = []
    for number in range(count(3, 10)):
        for name in MODELS:
            # another seed each round, so that nothing is answered from the host's cache, then the one that is known
            prompt, _ = video(DEVICES, name, after=demand, seed=100 + number)
            outputs = own.run(prompt)
            asked = next(output for output in outputs.values() if "during" in output)
            assert len(asked["before"]) == 2 and min(asked["before"]) > 0, "the workers held no weights after sampling"
            assert asked["during"] == [0, 0], "the workers still held weights when the demand ran"
            result = run(own, *video(DEVICES, name)).parts[0] if number in (0, count(3, 10) - 1) else None
            if result is not None:
                torch.testing.assert_close(result, expected[name], rtol=0, atol=2e-4)
        sizes.append(sum(worker["resident_bytes"] for worker in workers(own)))
    print("\nworkers' resident size by round, MB:", ", ".join(f"{size / 1e6:.1f}" for size in sizes))
    assert sizes[-1] <= 1.02 * sizes[1], "the workers grew from round to round"


def test_results_do_not_depend_on_what_happened_between(own: ComfyServer) -> None:
    first = run(own, *video(DEVICES, after=demand, seed=7)).parts[0]
    run(own, *video(DEVICES, MODELS[1], after=demand, seed=8))
    own.post("/free", {"unload_models": True, "free_memory": True})
    assert torch.equal(run(own, *video(DEVICES, after=demand, seed=7)).parts[0], first)


@pytest.mark.parametrize("body", [{"unload_models": True}, {"free_memory": True}], ids=str)
def test_the_unload_button_frees_the_workers(own: ComfyServer, body: dict[str, bool]) -> None:
    run(own, *video(DEVICES, seed=time.monotonic_ns() % 10**9))
    before = pids(own)
    assert min(held(own)) > 0
    press_unload(own, body)
    assert pids(own) == before and all(map(alive, before)), "the workers stay"


@pytest.mark.parametrize(
    ("keep", "after_sampling", "after_demand"), [("auto", True, False), ("always", True, True), ("never", False, False)]
)
def test_keep_loaded(own: ComfyServer, keep: str, after_sampling: bool, after_demand: bool) -> None:
    def small_demand(branch: Branch, samples: Link) -> Link:
        return branch.add("SPTestMemoryDemand", samples=samples, megabytes=1, all=False)[0]

    prompt, _ = video(DEVICES, keep_loaded=keep, after=small_demand, seed=time.monotonic_ns() % 10**9)
    asked = next(output for output in own.run(prompt).values() if "during" in output)
    assert [size > 0 for size in asked["before"]] == [after_sampling] * 2
    assert [size > 0 for size in asked["during"]] == [after_demand] * 2
    press_unload(own)


def test_a_dropped_model_leaves_the_workers(own: ComfyServer) -> None:
    own.post("/free", {"unload_models": True, "free_memory": True})
    run(own, *video(DEVICES, MODELS[0], seed=1))
    run(own, *video(DEVICES, MODELS[1], seed=1))
    wait_for(lambda: len(status(own)["models"]) == 1, 20, "the host to let go of the first model")
    wait_for(lambda: len({size for size in held(own)}) == 1, 20, "the workers to do so too")


def test_the_workers_load_once_for_a_sampling_run(own: ComfyServer) -> None:
    """Under dynamic VRAM each load brings back weights that were just found not to fit."""

    def loads(rank: int) -> int:
        return len(re.findall(rf"\[SP rank {rank}\].*SPTestCountLoads: asked to load", own.log()))

    for number in range(1, 4):
        run(own, *video(DEVICES, change=lambda branch, model: branch.add("SPTestCountLoads", model=model)[0], steps=4, seed=300 + number))
        wait_for(lambda number=number: [loads(0), loads(1)] >= [number, number], 5, "the log to be complete")
        assert [loads(0), loads(1)] == [number, number]


def test_no_forward_but_the_first_walks_over_the_parameters(own: ComfyServer) -> None:
    """A worker reads the shape of a model once: thousands of parameters take milliseconds, on every rank."""

    def walks(steps: int, seed: int) -> list[int]:
        before = len(own.log())
        run(own, *video(DEVICES, change=lambda branch, model: branch.add("SPTestCountWalks", model=model)[0], steps=steps, seed=seed))
        # what both ranks say behind their last forward
        time.sleep(1)
        said = own.log(before)
        return [len(re.findall(rf"\[SP rank {rank}\].*SPTestCountWalks: a block", said)) for rank in (0, 1)]

    first = walks(1, 320)
    assert min(first) > 0, "the shape has to be read once"
    assert walks(4, 321) == walks(1, 322) == [0, 0]


def test_a_loaded_model_needs_no_memory_again(own: ComfyServer) -> None:
    """Else the host would make room on the device for what worker 0 holds there already."""
    graph = Graph()
    branch = Branch(graph, DEVICES)
    model = branch.patch(load(branch, MODELS[0]))
    samples = sample(branch, model, text(branch, 4096), latent(branch, "1,16,3,10,14"), seed=time.monotonic_ns() % 10**9)
    branch.add("SPTestTakeOver", samples=samples, model=model)
    asked = next(output for output in own.run(graph.prompt).values() if "required" in output)
    assert asked["size"][0] > 0 and asked["required"] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_lets_go_and_the_next_step_has_all(own: ComfyServer, rank: int) -> None:
    """GPUs differ in what else is on them; the CPU that all workers share here is one device, so a node asks for it."""
    graph = Graph()
    branch = Branch(graph, DEVICES)
    model = branch.patch(load(branch, MODELS[0]))
    words = text(branch, 4096)
    samples = sample(branch, model, words, latent(branch, "1,16,3,10,14"), seed=400 + rank)
    between = branch.add("SPTestReleaseOneRank", samples=samples, model=model, rank=rank)[0]
    saved = [
        branch.add("SPTestSaveLatent", samples=latents, name=f"one-rank-{rank}-{number}").id
        for number, latents in enumerate((samples, sample(branch, model, words, between, seed=1, denoise=0.5)))
    ]
    outputs = own.run(graph.prompt)
    asked = next(output for output in outputs.values() if "held" in output)["held"]
    assert asked[rank] == 0 and asked[1 - rank] > 0
    stock_graph = Graph()
    stock = Branch(stock_graph, None)
    plain = load(stock, MODELS[0])
    first = sample(stock, plain, text(stock, 4096), latent(stock, "1,16,3,10,14"), seed=400 + rank)
    second = sample(stock, plain, text(stock, 4096), first, seed=1, denoise=0.5)
    expected = [
        stock.add("SPTestSaveLatent", samples=latents, name=f"one-rank-stock-{rank}-{n}").id for n, latents in enumerate((first, second))
    ]
    wanted = own.run(stock_graph.prompt)
    for mine, theirs in zip(saved, expected, strict=True):
        torch.testing.assert_close(read(outputs[mine]).parts[0], read(wanted[theirs]).parts[0], rtol=0, atol=2e-4)


#: --lowvram and its kin exclude --cpu; what workers make of them is a probe of test_comfy_api.py
FLAGS = [("--disable-dynamic-vram",), ("--disable-smart-memory",), ("--cache-none",), ("--reserve-vram=1",)]


@pytest.mark.parametrize("flags", parameters(plain=[], campaign=FLAGS), ids=" ".join)
def test_memory_flags_are_accepted(comfyui: Path, base: Path, flags: tuple[str, ...], require_flag: Callable[[str], None]) -> None:
    for flag in flags:
        require_flag(flag)
    with ComfyServer(comfyui, base, "--cpu", *flags) as server:
        stock = run(server, *video(None)).parts[0]
        torch.testing.assert_close(run(server, *video(DEVICES)).parts[0], stock, rtol=0, atol=2e-4)
        press_unload(server)


@pytest.fixture
def require_flag(comfyui: Path) -> Callable[[str], None]:
    known = (comfyui / "comfy" / "cli_args.py").read_text()

    def check(flag: str) -> None:
        if f'"{flag.partition("=")[0]}"' not in known:
            pytest.skip(f"this ComfyUI has no {flag}")

    return check
