"""The table of nodes: every file has a row, and where the nodes cannot be loaded every row has a stand-in that says why."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The root package as ComfyUI loads it, in a Python that has no ``comfy_api``."""
    monkeypatch.setitem(sys.modules, "folder_paths", ModuleType("folder_paths"))
    monkeypatch.setitem(sys.modules, "comfy_api", None)
    spec = importlib.util.spec_from_file_location("sp_extension", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sp_extension", module)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.startswith("sp_extension.")]:
        del sys.modules[name]


def table() -> Any:
    spec = importlib.util.spec_from_file_location("sp_node_table", ROOT / "nodes" / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NODES


def test_every_row_is_a_file_with_one_node_and_every_node_has_a_row() -> None:
    declared = {
        (node.name, path.stem)
        for path in (ROOT / "nodes").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "io.ComfyNode" for base in node.bases)
    }
    rows = [(row.node_id, row.file) for row in table()]
    assert set(rows) == declared
    assert len({file for _, file in rows}) == len(rows), "one file a node"


def test_a_missing_requirement_becomes_stand_ins_that_name_it(extension: Any) -> None:
    assert not hasattr(extension, "comfy_entrypoint"), "ComfyUI would prefer neither"
    classes, names = extension.NODE_CLASS_MAPPINGS, extension.NODE_DISPLAY_NAME_MAPPINGS
    assert set(classes) == set(names) == {row.node_id for row in table()}
    texts = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text())
    assert names == {node_id: f"{texts[node_id]['display_name']} (unavailable)" for node_id in classes}
    for stand_in in classes.values():
        assert "comfy_api" in stand_in.DESCRIPTION and "requirements.txt" in stand_in.DESCRIPTION
        assert stand_in.INPUT_TYPES()["required"]
        with pytest.raises(RuntimeError, match=r"comfy_api.*requirements\.txt"):
            getattr(stand_in(), stand_in.FUNCTION)()


def test_another_copy_of_the_package_is_named(extension: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = ModuleType("sp_core")
    other.__file__ = str(tmp_path / "sp_core" / "__init__.py")
    monkeypatch.setitem(sys.modules, "sp_core", other)
    extension.__spec__.loader.exec_module(extension)
    for stand_in in extension.NODE_CLASS_MAPPINGS.values():
        assert str(tmp_path) in stand_in.DESCRIPTION and "two copies" in stand_in.DESCRIPTION
