"""Every shipped workflow, posted to a ComfyUI that has this extension and no models: it says which file is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sp_core.demo.comfy_server import EXTENSION, ComfyServer, PromptFailed

WORKFLOWS = sorted((EXTENSION / "workflows" / "api").glob("*.json"))
MODEL_FILES = (".safetensors", ".gguf", ".pt", ".pth", ".ckpt")


@pytest.fixture(scope="module")
def own_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As after ``git clone``: the extension is the only thing that was added."""
    base = tmp_path_factory.mktemp("bare")
    for folder in ("models", "custom_nodes", "input", "output", "user", "temp"):
        (base / folder).mkdir()
    (base / "custom_nodes" / EXTENSION.name).symlink_to(EXTENSION, target_is_directory=True)
    return base


def files_in(prompt: dict[str, Any]) -> set[str]:
    values = [value for node in prompt.values() for value in node["inputs"].values()]
    return {value for value in values if isinstance(value, str) and value.endswith(MODEL_FILES)}


def test_there_are_workflows() -> None:
    assert WORKFLOWS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_runs_or_names_the_missing_files(own: ComfyServer, path: Path) -> None:
    prompt = json.loads(path.read_text())
    wanted = files_in(prompt)
    assert wanted, "a workflow without a model"
    for class_type in {node["class_type"] for node in prompt.values()}:
        assert own.get(f"/object_info/{class_type}"), f"a bare ComfyUI has no {class_type}"
    with pytest.raises(PromptFailed) as refused:
        own.queue(prompt)
    said = str(refused.value)
    print(f"\n{path.stem}: {said}")
    assert all(name in said for name in wanted), f"not named: {sorted(name for name in wanted if name not in said)}"
    # nothing else may be wrong with it
    errors = [error for node in refused.value.details["node_errors"].values() for error in node["errors"]]
    inputs = tuple(f"Invalid {kind} file" for kind in ("image", "audio", "video"))
    others = [error for error in errors if error["type"] != "value_not_in_list" and not any(said in error["details"] for said in inputs)]
    assert not others
