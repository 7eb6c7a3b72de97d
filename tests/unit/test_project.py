"""What the project says of itself in more than one place agrees."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sp_core.plans import PLANS

ROOT = Path(__file__).resolve().parents[2]


def lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "-r"))]


def test_requirements_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == lines("requirements.txt")
    assert "web" not in project["tool"]["comfy"], "WEB_DIRECTORY names the folder already; naming it twice loads it twice"


def test_readme_links_exist() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_readme_lists_every_workflow() -> None:
    text = (ROOT / "README.md").read_text()
    for path in (ROOT / "workflows").glob("*.json"):
        assert f"| {path.stem} |" in text


def test_readme_lists_every_architecture() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in PLANS if f"`{name}`" not in text] == []


def test_every_help_page_has_its_translation() -> None:
    pages = {path.stem for path in (ROOT / "web" / "docs").glob("*.md")}
    assert pages >= {"SPModelPatch", "SPSampler"}
    for page in pages:
        assert (ROOT / "web" / "docs" / page / "zh.md").read_text().startswith("# ")


def test_translations_name_what_english_names() -> None:
    english, chinese = (json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text()) for language in ("en", "zh"))
    assert set(chinese) <= set(english)
    for node, texts in chinese.items():
        for part in ("inputs", "outputs"):
            assert set(texts[part]) == set(english[node][part]), f"{part} of {node}"
