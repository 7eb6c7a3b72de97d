"""A plan is a declaration: at most 80 lines of code, and no forward of a model among them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from sp_core.plans import PLANS

PLANS_FOLDER = Path(__file__).resolve().parents[2] / "sp_core" / "plans" / "architectures"
FILES = sorted(path for path in PLANS_FOLDER.glob("*.py") if path.stem != "__init__")


def code_lines(source: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def test_counting() -> None:
    assert code_lines('"""Words."""\n\n# more\nx = (\n    1,\n)\n\n\ndef f():\n    """Words\n    and more."""\n    return x  # why\n') == 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_plan_is_short(path: Path) -> None:
    lines = code_lines(path.read_text())
    print(f"{path.stem}: {lines} lines of code")
    assert 5 < lines <= 80


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_plan_copies_no_forward(path: Path) -> None:
    """No class, and nothing that computes: neither torch.nn.functional nor a call of a module's forward."""
    tree = ast.parse(path.read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"functional", "softmax", "matmul", "linear", "forward_orig", "norm1"}


def test_a_shared_rule_is_used_by_two_files_of_plans() -> None:
    """And one that a single file uses is not among the shared ones: docs/architecture.md says where it goes."""
    shared = ast.parse((PLANS_FOLDER.parent / "shard_rules.py").read_text())
    rules = [node.name for node in shared.body if isinstance(node, ast.FunctionDef) and node.args.args[-1].arg in ("state", "dim")]
    assert "by_token" in rules and "segments" in rules
    users = {rule: [path.stem for path in FILES if re.search(rf"\b{rule}\b", path.read_text())] for rule in rules}
    assert {rule: files for rule, files in users.items() if len(files) < 2} == {}


def test_every_plan_is_in_a_counted_file() -> None:
    text = "".join(path.read_text() for path in FILES)
    assert [name for name in PLANS if f'"{name}"' not in text] == []


def test_the_page_shows_a_plan_that_works() -> None:
    """docs/add-a-model.md quotes a plan that test_families.py runs."""
    page = (PLANS_FOLDER.parents[2] / "docs" / "add-a-model.md").read_text()
    quoted = page.split("```python\n")[1].split("```")[0]
    assert quoted in (PLANS_FOLDER / "kandinsky.py").read_text()
