"""What begins and ends with a sampling run, what a MODEL brings along, and callbacks that come too late."""

from __future__ import annotations

from collections import Counter

from host.boundary import before, behind, named, notes, on_wan, watched
from host.graphs import Branch, Link, compare, load, run_sp
from host.observe import wait_for

from sp_core.demo.comfy_server import ComfyServer

DEVICES = "cpu:2"


def test_a_patch_that_begins_anew_with_each_run(server: ComfyServer) -> None:
    for seed in (71, 72):

        def case(branch: Branch, seed: int = seed) -> Link:
            model = branch.patch(branch.add("SPForeignPerRun", model=load(branch, "tiny_wan_t2v"))[0])
            return on_wan(branch, model, seed=seed)

        compare(server, named(f"run_{seed}", case), DEVICES, cfg_split=1)


def test_runs_begin_and_end_in_the_workers(server: ComfyServer) -> None:
    watched(server)
    notes(server, "lives")
    for seed in (73, 74):

        def case(branch: Branch, seed: int = seed) -> Link:
            return on_wan(branch, branch.patch(branch.add("SPForeignPerRun", model=load(branch, "tiny_wan_t2v_low"))[0]), seed=seed)

        run_sp(server, named(f"life_{seed}", case))
    lives: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}

    def told() -> bool:
        for rank, more in notes(server, "lives").items():
            lives[rank] += more
        return sum(counted.total() for counted in lives.values()) >= 8

    # the end of a run is told to the workers behind the prompt
    wait_for(told, 5, "both ranks to say how two runs began and ended")
    assert lives == {rank: Counter(pre_run=2, cleanup=2) for rank in (0, 1)}, lives


def test_companions_of_a_model_are_loaded_in_the_workers(server: ComfyServer) -> None:
    watched(server)
    notes(server, "companions")
    compare(server, before("SPForeignCompanion", "tiny_wan_t2v_low"), DEVICES)
    loaded = notes(server, "companions")
    assert {rank: set(counts) for rank, counts in loaded.items()} == {rank: {"first", "second"} for rank in (0, 1)}, loaded


def test_a_callback_behind_the_patch_is_named_in_a_warning(server: ComfyServer) -> None:
    since = len(server.log())
    compare(server, behind("SPForeignCallback"), DEVICES)
    lines = [line for line in server.log(since).splitlines() if "set_fast_sums" in line or "SPForeignCallback" in line]
    assert lines, "no line names the callback"
