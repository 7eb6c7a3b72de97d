"""Imports point one way, nodes -> host -> pool -> plans -> attention -> comm -> layout, and most folders do not know ComfyUI."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "sp_core"

#: a module may import what has its own number or a lower one
LEVELS = {
    "errors": 0,
    "settings": 0,
    "memory_file": 0,
    "layout": 0,
    "planner": 1,
    "comm": 1,
    "attention": 2,
    "parallel": 3,
    "plans": 4,
    "pool": 1,
    "reference": 6,
    "ports": 4,
    "models": 6,
    "host": 7,
    "demo": 8,
    "bench": 8,
    "doctor": 8,
    "cli": 8,
    "__main__": 8,
}
KNOW_THE_HOST = {"host", "models", "demo"}
THE_HOSTS = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "execution", "folder_paths", "main", "nodes", "server", "utils"}


def modules() -> list[Path]:
    return sorted(path for path in CORE.rglob("*.py") if path != CORE / "__init__.py")


def folder_of(path: Path) -> str:
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name from sp_core's point of view, whether it runs when the module is imported)."""
    package = ("sp_core", *path.relative_to(CORE).parts[:-1])

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            at_import = False
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join((*base, *([node.module] if node.module else [])))
            yield from ((f"{name}.{alias.name}" if node.module is None else name, at_import) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import)

    yield from visit(ast.parse(path.read_text()), True)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(CORE)))
def test_arrows_go_down(path: Path) -> None:
    level = LEVELS[folder_of(path)]
    up = [name for name, _ in imports(path) if name.startswith("sp_core.") and LEVELS[name.split(".")[1]] > level]
    assert not up, f"{path.relative_to(ROOT)} (level {level}) imports upward: {sorted(set(up))}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(CORE)))
def test_the_rest_does_not_import_the_host(path: Path) -> None:
    """Elsewhere the package has to be importable, and to work, without ComfyUI."""
    if folder_of(path) in KNOW_THE_HOST:
        return
    hosts = [name for name, at_import in imports(path) if name.split(".")[0] in THE_HOSTS and at_import]
    assert not hosts, f"{path.relative_to(ROOT)} imports {hosts} when it is imported"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(CORE)))
def test_imports_inside_are_relative(path: Path) -> None:
    """The package is loaded under one name without being on sys.path; only scripts that are run by path may not be relative."""
    absolute = [
        node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "sp_core"
    ]
    scripts = {"pool/bootstrap.py", "demo/checkpoints.py"}
    assert not absolute or str(path.relative_to(CORE)) in scripts, absolute


def test_nodes_talk_to_the_upper_layers_only() -> None:
    allowed = ("sp_core.host", "sp_core.models", "sp_core.planner", "sp_core.errors", "sp_core.doctor")
    for path in sorted((ROOT / "nodes").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sp_core"):
                assert (node.module or "").startswith(allowed), (path.name, node.module)
