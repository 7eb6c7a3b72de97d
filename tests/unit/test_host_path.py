"""Finding a ComfyUI checkout, also before anything is installed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from sp_core import host_path


def checkout(folder: Path) -> Path:
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    return folder


def test_the_environment_is_asked_first_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path / "ComfyUI")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(host_path, "EXTENSION", tmp_path / "nowhere" / "custom_nodes" / "extension")
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    assert host_path.find_comfyui() == tmp_path / "ComfyUI"
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "empty"))
    assert host_path.find_comfyui() is None
    monkeypatch.setenv("COMFYUI_PATH", "~/other")
    checkout(tmp_path / "other")
    assert host_path.find_comfyui() == tmp_path / "other"


def test_the_checkout_around_the_extension_comes_before_the_one_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path / "ComfyUI")
    around = checkout(tmp_path / "around")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setattr(host_path, "EXTENSION", around / "custom_nodes" / "extension")
    assert host_path.find_comfyui() == around


@pytest.mark.parametrize("name", ["__init__.py", "host_path.py"])
def test_nothing_has_to_be_installed(name: str) -> None:
    """``tools/setup_env.py`` imports these to find out what to install."""
    tree = ast.parse((Path(host_path.__file__).parent / name).read_text())
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert modules and {module.split(".")[0] for module in modules} <= sys.stdlib_module_names
