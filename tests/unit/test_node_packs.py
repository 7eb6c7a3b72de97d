"""Which packs a worker loads for a graph, what it says of one that does not load, and what others see meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sp_core.errors import SPError
from sp_core.host.worker import node_packs
from sp_core.host.worker.node_packs import NodePacks, NoSuchNode, PackFailed, ancestors, reason_of_warnings, runnable_part
from sp_core.host.worker.replay import failed_class


def entry(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


GRAPH = {
    "loader": entry("Loader", name="a.safetensors", size=["a list", 2]),
    "lora": entry("Lora", model=["loader", 0], strength=1.0),
    "odd": entry("Odd", model=["loader", 0]),
    "behind": entry("Lora", model=["odd", 0]),
}


@pytest.mark.parametrize(
    ("node", "expected"), [("loader", ["loader"]), ("lora", ["loader", "lora"]), ("behind", ["loader", "odd", "behind"])]
)
def test_a_node_needs_what_leads_to_it(node: str, expected: list[str]) -> None:
    assert ancestors(GRAPH, node) == expected


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ({"Loader", "Lora", "Odd"}, set(GRAPH)),
        ({"Loader", "Lora"}, {"loader", "lora"}),
        ({"Loader", "Odd"}, {"loader", "odd"}),
        ({"Lora"}, set()),
    ],
)
def test_what_needs_a_node_that_is_not_loaded_goes_with_it(classes: set[str], expected: set[str]) -> None:
    assert set(runnable_part(GRAPH, classes)) == expected


TRACEBACK = 'Traceback (most recent call last):\n  File "nodes.py", line 2263, in load_custom_node\n    exec_module(module)\n'


@pytest.mark.parametrize(
    ("warnings", "reason"),
    [
        ([], "ComfyUI's log has the reason"),
        (["a remark", "Skip x due to the lack of NODE_CLASS_MAPPINGS"], "Skip x due to the lack of NODE_CLASS_MAPPINGS"),
        ([TRACEBACK + "ImportError: libfancy.so.3 is missing", "Cannot import x"], "ImportError: libfancy.so.3 is missing"),
        ([TRACEBACK + "RuntimeError: too old.\nInstall 2.0", "Cannot import x"], "RuntimeError: too old. Install 2.0"),
        ([TRACEBACK + "KeyError: 'of another pack'", "Cannot import y", "a remark", "Skip x"], "Skip x"),
    ],
)
def test_the_reason_of_a_failed_import(warnings: list[str], reason: str) -> None:
    assert reason_of_warnings(warnings) == reason


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("execution_start", {}), ("execution_error", {"node_type": "Odd"})], "Odd"),
        ([("execution_error", {})], None),
        ([("execution_interrupted", {"node_type": "Odd"})], None),
    ],
)
def test_the_class_of_the_node_that_failed(messages: list[Any], expected: str | None) -> None:
    assert failed_class(messages) == expected


CATALOGUE = {
    "Latent": ("comfy_extras", "/comfy_extras/nodes_latent.py"),
    "First": ("custom_nodes", "/packs/first"),
    "Odd": ("custom_nodes", "/packs/odd"),
    "Twice": ("custom_nodes", "/packs/odd"),
    "Asks": ("custom_nodes", "/packs/asks"),
}
HAS = {"nodes_latent.py": ["Latent"], "first": ["First", "Twice"], "odd": ["Odd", "Twice"], "asks": ["Asks"]}


class Host:
    """Stands for ComfyUI: packs with these classes, each of which may do something while it is imported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[str] = []
        self.on_import: dict[str, Callable[[], object]] = {}
        self.nodes: Any = SimpleNamespace(NODE_CLASS_MAPPINGS={"Loader": "nodes", "Lora": "nodes"})
        monkeypatch.setitem(sys.modules, "nodes", self.nodes)
        monkeypatch.setattr(node_packs.comfy_api, "load_node_pack", self.load)
        monkeypatch.setattr(node_packs.comfy_api, "make_prompt_server", SimpleNamespace)
        self.packs = NodePacks(json.loads(json.dumps(CATALOGUE)), lambda: None)

    def load(self, path: str, parent: str, ignore: Collection[str] = ()) -> bool:
        name = path.rpartition("/")[2]
        self.on_import.get(name, lambda: None)()
        self.loaded.append(name)
        for class_type in set(HAS[name]) - set(ignore):
            self.nodes.NODE_CLASS_MAPPINGS[class_type] = name
        return True


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def failing() -> None:
    raise ImportError("libfancy.so.3 is missing")


def ending() -> None:
    sys.exit("please run install.py first")


def test_a_graph_loads_the_packs_of_its_own_nodes(host: Host) -> None:
    graph = host.packs.load_for(GRAPH, "lora")
    assert host.loaded == [] and set(graph) == {"loader", "lora"}
    graph = host.packs.load_for(GRAPH, "odd")
    assert host.loaded == ["nodes_latent.py", "odd"] and set(graph) == set(GRAPH)
    host.packs.load_for(GRAPH, "odd")
    assert host.loaded == ["nodes_latent.py", "odd"]


def test_a_pack_that_does_not_load_is_named_with_the_reason_and_tried_again(host: Host) -> None:
    host.on_import["odd"] = failing
    with pytest.raises(PackFailed, match=r"^odd, which has the node Odd, does not load in the worker: libfancy\.so\.3 is missing"):
        host.packs.load_for(GRAPH, "odd")
    assert set(host.packs.load_for(GRAPH, "lora")) == {"loader", "lora"}
    del host.on_import["odd"]
    assert set(host.packs.load_for(GRAPH, "odd")) == set(GRAPH)


def test_a_pack_that_ends_python_does_not_load(host: Host) -> None:
    host.on_import["odd"] = ending
    with pytest.raises(PackFailed, match=r"^odd, .* does not load in the worker: it ended Python \(please run install\.py first\)"):
        host.packs.load("Odd")


def test_a_class_that_no_pack_has(host: Host) -> None:
    with pytest.raises(NoSuchNode, match=r"^the graph needs the node Nothing, which ComfyUI's process does not have$"):
        host.packs.load_for({"a": entry("Nothing")}, "a")
    assert "Nothing" not in host.nodes.NODE_CLASS_MAPPINGS and host.nodes.NODE_CLASS_MAPPINGS.get("Nothing", 3) == 3
    with pytest.raises(KeyError):
        host.nodes.NODE_CLASS_MAPPINGS["Nothing"]


def test_a_pack_that_asks_for_another_packs_node_has_it_loaded(host: Host) -> None:
    found = []
    # while it is imported it has no node of its own yet, as in ComfyUI
    host.on_import["asks"] = lambda: found.extend([host.nodes.NODE_CLASS_MAPPINGS.get("First"), "Asks" in host.nodes.NODE_CLASS_MAPPINGS])
    host.packs.load_for({"a": entry("Asks")}, "a")
    assert found == ["first", False] and host.loaded == ["nodes_latent.py", "first", "asks"]


def test_a_module_of_a_pack_is_there_once_the_pack_is_loaded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("/packs/odd")
    host.on_import["odd"] = lambda: monkeypatch.setitem(sys.modules, "/packs/odd", made)
    assert host.packs.module("/packs/odd") is made and host.loaded == ["nodes_latent.py", "odd"]
    assert host.packs.module("torch") is sys.modules["torch"]


@pytest.mark.parametrize("name", ["os", "subprocess", "builtins", "/packs/oddest", "/packs/unknown", "pytest"])
def test_no_other_module_is_imported(host: Host, name: str) -> None:
    with pytest.raises(SPError, match=r"neither ComfyUI's nor a loaded node pack's"):
        host.packs.module(name)
    assert host.loaded == []


def test_a_pack_that_fails_for_a_patch_is_named(host: Host) -> None:
    host.on_import["odd"] = failing
    with pytest.raises(PackFailed, match=r"odd, which has a patch of the model, does not load: .*"):
        host.packs.module("/packs/odd.inner")


def test_of_two_packs_the_one_counts_that_counts_in_comfyui(host: Host) -> None:
    host.packs.load("Odd")
    host.packs.load("First")
    assert host.nodes.NODE_CLASS_MAPPINGS["Twice"] == "odd"


def test_the_rest_is_loaded_once_and_a_failure_there_is_no_error(host: Host) -> None:
    host.on_import["odd"] = failing
    assert host.packs.load_rest() and host.loaded == ["nodes_latent.py", "first", "asks"]
    assert not host.packs.load_rest()
    assert [host.packs.is_custom(name) for name in ("Odd", "Latent", "Loader", None)] == [True, False, False, False]
