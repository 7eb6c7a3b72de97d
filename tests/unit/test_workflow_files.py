"""The shipped workflows: both formats are the same graph, and both use the nodes of this extension."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
UI = {path.stem: path for path in (ROOT / "workflows").glob("*.json")}
API = {path.stem: path for path in (ROOT / "workflows" / "api").glob("*.json")}
#: what the frontend keeps behind a seed
AFTER_SEED = {"fixed", "increment", "decrement", "randomize"}
OURS = {"SPModelPatch", "SPSampler"}


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_each_workflow_comes_in_both_formats() -> None:
    assert set(UI) == set(API)
    assert len(UI) >= 5


def test_both_nodes_are_shown_somewhere() -> None:
    used = {node["class_type"] for path in API.values() for node in load(path).values()}
    assert used >= OURS


@pytest.mark.parametrize("name", sorted(UI))
def test_formats_agree(name: str) -> None:
    ui, api = load(UI[name]), load(API[name])
    nodes = {str(node["id"]): node for node in ui["nodes"] if node["type"] not in ("Note", "MarkdownNote")}
    assert {key: node["type"] for key, node in nodes.items()} == {key: node["class_type"] for key, node in api.items()}
    links = {link[0]: link for link in ui["links"]}
    for key, node in nodes.items():
        wires = {}
        for index, socket in enumerate(node["inputs"]):
            if socket["link"] is not None:
                _, source, output, target, target_slot, _ = links.pop(socket["link"])
                assert (str(target), target_slot) == (key, index)
                assert socket["link"] in nodes[str(source)]["outputs"][output]["links"]
                wires[socket["name"]] = [str(source), output]
        inputs = api[key]["inputs"]
        assert wires == {input_name: value for input_name, value in inputs.items() if isinstance(value, list)}, f"wires of {node['type']}"
        expected: list[Any] = []
        for input_name, value in inputs.items():
            if not isinstance(value, list):
                expected.append(value)
                expected += [AFTER_SEED] if input_name in ("seed", "noise_seed") else []
        shown = node["widgets_values"]
        assert len(shown) == len(expected), f"widgets of {node['type']}"
        for ours, theirs in zip(shown, expected, strict=True):
            assert ours in theirs if isinstance(theirs, set) else ours == theirs, f"widgets of {node['type']}"
    assert not links, "wires that end nowhere"


@pytest.mark.parametrize("name", sorted(UI))
def test_model_files_can_be_downloaded_from_the_frontend(name: str) -> None:
    ui, api = load(UI[name]), load(API[name])
    files = {
        value for node in api.values() for value in node["inputs"].values() if isinstance(value, str) and value.endswith(".safetensors")
    }
    known = {model["name"] for node in ui["nodes"] for model in node["properties"].get("models", [])}
    assert files == known
    for node in ui["nodes"]:
        for model in node["properties"].get("models", []):
            assert model["url"].endswith("/" + model["name"])


@pytest.mark.parametrize("name", sorted(UI))
def test_nodes_do_not_overlap(name: str) -> None:
    title = 30
    boxes = [
        (node["pos"][0], node["pos"][1] - title, node["pos"][0] + node["size"][0], node["pos"][1] + node["size"][1], node["type"])
        for node in load(UI[name])["nodes"]
    ]
    for number, a in enumerate(boxes):
        for b in boxes[:number]:
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, f"{a[4]} and {b[4]} overlap"
