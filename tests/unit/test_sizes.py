"""A file has one idea, a function one step: both are short in the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "sp_core"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 50


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_files_and_functions_are_short(file: Path) -> None:
    text = file.read_text()
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}  # type: ignore[operator]
    assert len(text.splitlines()) <= MOST_LINES_OF_A_FILE
    assert {name: count for name, count in lines.items() if count > MOST_LINES_OF_A_FUNCTION} == {}
