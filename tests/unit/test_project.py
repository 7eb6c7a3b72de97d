"""What the project says of itself in more than one place agrees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sp_core", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_command_line_says_what_it_can_do() -> None:
    asked, nothing, wrong = run("--help"), run(), run("levitate")
    assert asked.returncode == 0
    assert nothing.returncode == wrong.returncode == 2
    for answer in (asked.stdout, nothing.stderr, wrong.stderr):
        assert all(command in answer for command in ("demo", "bench", "doctor"))
    assert all(command in run("bench", "--help").stdout for command in ("exchange", "step", "overhead", "memory"))


def test_command_line_needs_no_host(tmp_path: Path) -> None:
    """The demo says that it found no ComfyUI, and a wrong device list is a sentence."""
    environment = {**os.environ, "COMFYUI_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "sp_core", "demo", "--devices", "cpu:0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "'cpu:0' asks for 0 CPU workers" in done.stderr
    assert "Traceback" not in done.stderr
