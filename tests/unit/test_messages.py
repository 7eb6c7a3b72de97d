"""The messages that docs/troubleshooting.md explains are those that the code gives."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*(ROOT / "nodes").glob("*.py"), *(ROOT / "sp_core").rglob("*.py")]
#: stands for what a message is filled with
FILLED = "\0"


def texts_of(source: str) -> list[str]:
    """Every string of a file but its docstrings, with a mark where it is filled in."""
    tree, found = ast.parse(source), []
    passed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    passed |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else FILLED for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            found.append(re.sub(r"%[sd]", FILLED, node.value))
    return found


TEXTS = [text for file in SOURCES for text in texts_of(file.read_text())]


def quoted() -> list[str]:
    """The messages of the table, in the order of its rows."""
    section = (ROOT / "docs" / "troubleshooting.md").read_text().split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [re.fullmatch(r"\| \*([^*]+)\*( \(log\))? \| .+ \|", row)[1] for row in rows]  # type: ignore[index]


def stands_in_the_code(part: str) -> bool:
    """A string of the code is this part of a message: "..." and N stand for what the code fills in, or leaves to later strings."""
    words = [re.escape(word) for word in re.split(r"\.\.\.|\bN\b", part)]
    pattern = re.compile(".*".join(words), re.DOTALL)
    return any(pattern.search(text) for text in TEXTS)


def is_said(message: str) -> bool:
    """Behind "Rank N failed: " stands a sentence of its own, and behind "while " what a rank was doing."""
    return stands_in_the_code(message) or all(map(stands_in_the_code, re.split(": | while ", message)))


def test_what_nobody_says_is_not_found() -> None:
    assert len(quoted()) > 25
    assert is_said("Rank N failed: out of main memory")
    for message in ("Rank N failed: out of patience", "The worker of rank N was sent home", "no device ... is nothing to share"):
        assert not is_said(message)


@pytest.mark.parametrize("message", quoted())
def test_the_code_gives_the_message(message: str) -> None:
    assert is_said(message)
