"""What the contracts in pyproject.toml (``make lint``) do not say of imports: their form, and those of nodes/."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "sp_core"
#: run by path in an interpreter of their own, where nothing is relative to anything
SCRIPTS = {"pool/bootstrap.py", "demo/checkpoints.py"}
#: what nodes/ may talk to
UPPER = ("sp_core.host", "sp_core.models", "sp_core.planner", "sp_core.errors", "sp_core.doctor")


def imported_from(path: Path) -> list[str]:
    """Modules that ``from ... import`` names in full."""
    tree = ast.parse(path.read_text())
    return [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]


def test_imports_inside_are_relative() -> None:
    """ComfyUI loads the package under a name of its own, and it is not on sys.path there."""
    absolute = {
        str(path.relative_to(CORE)) for path in CORE.rglob("*.py") for name in imported_from(path) if name.split(".")[0] == "sp_core"
    }
    assert absolute - SCRIPTS == set()


def test_nodes_talk_to_the_upper_layers_only() -> None:
    used = {(path.name, name) for path in (ROOT / "nodes").glob("*.py") for name in imported_from(path) if name.startswith("sp_core")}
    assert used, "the nodes call nothing"
    assert [(file, name) for file, name in sorted(used) if not name.startswith(UPPER)] == []
