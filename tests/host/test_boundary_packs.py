"""Packs that load in ComfyUI load in a worker; a restart leaves nothing behind; two device lists in one graph."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from campaign import CAMPAIGN
from host.boundary import alone, base_beside, before, named, on_wan, refusal, write_pack
from host.graphs import Branch, Link, compare, load, run_sp
from host.observe import alive, count, nothing_is_left, pids

from sp_core.demo.comfy_server import ComfyServer

DEVICES = "cpu:2"

_NODE = '''
class {name}:
    """A node that gives its MODEL back as a clone."""

    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{"model": ("MODEL",)}}}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "test"

    def run(self, model):
        {work}
        return (model.clone(),)


NODE_CLASS_MAPPINGS = {{"{name}": {name}}}
'''


def node(name: str, head: str = "", work: str = "pass") -> str:
    return head + _NODE.format(name=name, work=work)


IN_A_WORKER = 'import sys\nif "--disable-all-custom-nodes" in sys.argv:\n    '

#: as when another rank is just writing the file that the pack reads
HALF_WRITTEN = """
import json, os, sys
from . import part
if "--disable-all-custom-nodes" in sys.argv:
    assert not hasattr(part, "half_made"), "a module of the import that failed is still there"
    part.half_made = True
    tried = os.path.join(os.path.dirname(__file__), f"tried-{os.getpid()}")
    if not os.path.exists(tried):
        open(tried, "w").close()
        json.loads("")
"""

PACKS = {
    "sp_odd_settings": {"__init__.py": node("SPOddSettings", HALF_WRITTEN), "part.py": ""},
    "sp_odd_extras": {"__init__.py": node("SPOddExtras", "from comfy_extras.nodes_latent import LatentBatch  # noqa: F401\n")},
    "sp_odd_first": {
        "__init__.py": node("SPOddFirst", 'import folder_paths\nfolder_paths.add_model_folder_path("sp_odd", folder_paths.base_path)\n')
    },
    "sp_odd_needs_folder": {
        "__init__.py": node("SPOddNeedsFolder", "import folder_paths\n", 'folder_paths.folder_names_and_paths["sp_odd"]')
    },
    "sp_odd_asks": {
        "__init__.py": node("SPOddAsks", "import nodes\n", 'assert nodes.NODE_CLASS_MAPPINGS.get("SPOddFirst"), "SPOddFirst is not there"')
    },
    "sp_odd_signal": {"__init__.py": node("SPOddSignal", "import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\n")},
    "sp_odd_prestart": {"__init__.py": node("SPOddPrestart"), "prestartup_script.py": 'raise RuntimeError("no network to update from")\n'},
    "sp_odd_import": {"__init__.py": node("SPOddImport", IN_A_WORKER + 'raise ImportError("libfancy.so.3 is missing")\n')},
    "sp_odd_exit": {"__init__.py": node("SPOddExit", IN_A_WORKER + 'sys.exit("please run install.py first")\n')},
}


@pytest.fixture(scope="module")
def own_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With packs that are odd in one way each. The workers have loaded no pack before the first test."""
    folder = base_beside(base, tmp_path_factory.mktemp("odd"))
    for name, files in PACKS.items():
        write_pack(folder, name, files)
    return folder


@pytest.fixture(scope="module")
def own_environment(temporary: Path) -> dict[str, str]:
    return {"TMPDIR": str(temporary)}


@pytest.fixture(autouse=True)
def forgotten(own: ComfyServer) -> None:
    """ComfyUI forgets what earlier prompts made: a failed graph is part of no later load."""
    own.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(0.5)


def test_a_pack_that_imports_extra_nodes(own: ComfyServer) -> None:
    compare(own, before("SPOddExtras"), DEVICES)


def test_a_pack_that_builds_on_another(own: ComfyServer) -> None:
    compare(own, before("SPOddNeedsFolder"), DEVICES)


def test_a_pack_that_asks_for_the_node_of_another(own: ComfyServer) -> None:
    compare(own, before("SPOddAsks"), DEVICES)


def test_a_pack_that_sets_a_signal_handler(own: ComfyServer) -> None:
    compare(own, before("SPOddSignal"), DEVICES)


def test_a_pack_whose_prestartup_script_fails(own: ComfyServer) -> None:
    compare(own, before("SPOddPrestart"), DEVICES)


def test_a_pack_whose_settings_another_rank_is_writing(own: ComfyServer) -> None:
    compare(own, before("SPOddSettings"), DEVICES)


def test_the_reason_of_a_failed_import_is_in_the_sentence(own: ComfyServer) -> None:
    sentence = refusal(own, before("SPOddImport"))
    assert "sp_odd_import" in sentence and "libfancy.so.3 is missing" in sentence, sentence


def test_a_pack_that_exits_is_named(own: ComfyServer) -> None:
    sentence = refusal(own, before("SPOddExit"))
    assert "sp_odd_exit" in sentence and "please run install.py first" in sentence, sentence


def test_a_graph_that_failed_is_not_part_of_the_next_load(own: ComfyServer) -> None:
    def held(branch: Branch, model: Link, hold: bool) -> Link:
        """A pack keeps the MODELs that it saw; without it they live until the garbage collector comes."""
        number = time.monotonic_ns() >> 24
        return on_wan(branch, branch.add("SPForeignHolds", model=model, hold=hold, number=number)[0], seed=90)

    def failing(branch: Branch) -> Link:
        return held(branch, branch.patch(branch.add("SPOddImport", model=load(branch, "tiny_wan_t2v"))[0]), True)

    assert "sp_odd_import" in refusal(own, failing)
    try:
        compare(own, before("SPTestWeightPatch", key="diffusion_model.blocks.1.ffn.0.weight"), DEVICES)
    finally:
        let_go = alone(None)
        let_go.add("SPTestSaveLatent", samples=held(let_go, load(let_go, "tiny_wan_t2v"), False), name="let-go")
        own.run(let_go.graph.prompt)


def test_a_plain_graph_after_all_of_these(own: ComfyServer) -> None:
    compare(own, named("plain", lambda branch: on_wan(branch, branch.patch(load(branch, "tiny_wan_t2v")), seed=91)), DEVICES)


def one_stage(branch: Branch) -> Link:
    return on_wan(branch, branch.patch(load(branch, "tiny_wan_t2v")), seed=93)


def two_stages(branch: Branch, seed: int) -> Link:
    """The second on another list. Workers on the CPU share it, as any processes do, so lists of them never need the same device."""
    first = on_wan(branch, branch.patch(load(branch, "tiny_wan_t2v")), seed=seed)
    branch.devices = branch.devices and "cpu:3"
    model = branch.patch(load(branch, "tiny_wan_t2v_low"))
    return branch.add("LatentAdd", samples1=first, samples2=on_wan(branch, model, seed=seed))[0]


def test_two_device_lists_keep_a_pool_each(own: ComfyServer) -> None:
    run_sp(own, one_stage, DEVICES)
    first, seen = pids(own), []
    for seed in (92, 94):
        comparison = compare(own, named(f"two_lists_{seed}", lambda branch, seed=seed: two_stages(branch, seed)), DEVICES, check=False)
        assert max(comparison.errors) <= 2e-5, comparison.errors
        seen.append(pids(own))
    assert len(first) == 2 and set(first) < set(seen[0]), "the first list's workers were ended for the second's"
    assert len(seen[0]) == 5 and seen[0] == seen[1], "the next prompt started other workers"


@pytest.mark.campaign
def test_a_device_list_that_was_changed_ends_the_pools_of_the_former_ones(own: ComfyServer) -> None:
    """ComfyUI still holds the MODELs of both."""
    compare(own, named("two_lists", lambda branch: two_stages(branch, 95)), DEVICES, check=False)
    both = pids(own)
    compare(own, one_stage, "cpu:4")
    assert len(both) == 5 and len(pids(own)) == 4 and not any(map(alive, both))
    compare(own, named("back", one_stage), DEVICES)
    assert len(pids(own)) == 2


@pytest.mark.timeout(3600 if CAMPAIGN else 600)
def test_a_restart_by_exec_leaves_no_worker_behind(own: ComfyServer, temporary: Path) -> None:
    for number in range(count(1, 20)):
        restart(own, temporary, seed=200 + 2 * number)


def restart(own: ComfyServer, temporary: Path, seed: int) -> None:
    def video(branch: Branch) -> Link:
        return on_wan(branch, branch.patch(load(branch, "tiny_wan_t2v")), seed=seed)

    run_sp(own, named(f"before_restart_{seed}", video), DEVICES)
    old = pids(own)
    assert len(old) == 2
    try:
        with nothing_is_left(own, temporary), contextlib.suppress(OSError):
            own.get("/sp_foreign/restart")
        own.wait_until_up()
        compare(own, named(f"behind_restart_{seed}", video), DEVICES)
        assert len(pids(own)) == 2
    finally:
        for pid in old:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        own.wait_until_up()
