"""What the project says of itself in more than one place agrees."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from sp_core.plans import PLANS

ROOT = Path(__file__).resolve().parents[2]


def lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "-r"))]


def test_requirements_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == lines("requirements.txt")
    assert "web" not in project["tool"]["comfy"], "WEB_DIRECTORY names the folder already; naming it twice loads it twice"


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def links_of(page: Path) -> list[str]:
    """Targets within the repository, as they stand in the page."""
    return re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text())


def anchors_of(page: Path) -> set[str]:
    """What a forge makes of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_readme_and_docs_are_all_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += [target for link in links_of(page) if (target := (page.parent / link.partition("#")[0]).resolve()).suffix == ".md"]
    assert [page_name(page) for page in PAGES if page not in reached] == []


def test_what_the_readme_shows_is_in_the_package() -> None:
    """A package of the ComfyUI registry holds the tracked files less those that .comfyignore names, all of them by folder or file."""
    ignored = [line.rstrip("/") for line in lines(".comfyignore")]
    assert ignored and all((ROOT / name).exists() for name in ignored)
    assert [link for link in links_of(ROOT / "README.md") if any(link == name or link.startswith(f"{name}/") for name in ignored)] == []


# -- docs/architecture.md speaks of the code as it is


def code_words(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page.read_text())


@pytest.mark.parametrize(
    "page", ["docs/architecture.md", "docs/troubleshooting.md", "docs/systems.md", "docs/use.md", "CONTRIBUTING.md", "tests/README.md"]
)
def test_files_that_a_page_names_exist(page: str) -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("*")}
    # "launcher.py" after "pool/coordinator.py" means the same folder
    folder = ROOT / "sp_core"
    for word in code_words(ROOT / page):
        if not re.fullmatch(r"[\w./-]+(\.py|\.md|\.toml|\.yml|\.h|/)", word):
            continue
        places = [base / word for base in (ROOT, ROOT / "sp_core", folder, ROOT / "tests", ROOT / ".github" / "workflows")]
        found = next((place for place in places if place.exists()), None)
        assert found is not None or word in tests, f"{page}: {word}"
        folder = found.parent if found is not None else folder


def steps() -> list[tuple[str, str]]:
    """(file, function) of every row of the table of one denoising step."""
    rows = re.findall(r"^\| \d+ \| [CW] \| `([^`]+)` \| ([^|]+) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    return [(file, function) for file, functions in rows for function in re.findall(r"`([^`]+)`", functions)]


def defined_in(file: Path) -> set[str]:
    """Functions and classes of a file, methods also as Class.method."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_steps_are_found_in_the_architecture_page() -> None:
    assert len(steps()) > 30


@pytest.mark.parametrize(("file", "function"), steps(), ids=lambda value: value)
def test_functions_of_a_denoising_step_are_where_the_page_says(file: str, function: str) -> None:
    assert function in defined_in(ROOT / "sp_core" / file)


# -- the map of tests in tests/README.md

PACKAGE = ROOT / "sp_core"
TESTS = ROOT / "tests"


def map_rows() -> list[tuple[str, str]]:
    """(what was changed, its tests) of every row."""
    section = (TESTS / "README.md").read_text().split("\n## Which tests look at what I changed?\n")[1].split("\n## ")[0]
    return re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)


def for_each_model(word: str) -> list[str]:
    """``<model>`` stands for the file of each architecture."""
    models = [path.stem for path in (PACKAGE / "plans" / "architectures").glob("*.py") if path.name != "__init__.py"]
    return [word.replace("<model>", model) for model in models] if "<model>" in word else [word]


def files_of_the_map() -> set[Path]:
    """Files of the package that a row names, by themselves or by a folder, which stands for all that is in it."""
    named: set[Path] = set()
    for changed, _ in map_rows():
        folder = PACKAGE
        for word in re.findall(r"`([^`]+)`", changed):
            for name in for_each_model(word):
                place = PACKAGE / name if (PACKAGE / name).exists() else folder / name
                named |= set(place.rglob("*.py")) if name.endswith("/") else {place}
            folder = place.parent
    return named


def named_in_the_map() -> set[Path]:
    return {TESTS / name for _, tests in map_rows() for word in re.findall(r"`([^` ]+)", tests) for name in for_each_model(word)}


def test_the_map_of_tests_has_every_file_of_the_package() -> None:
    files = {path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert sorted(map(page_name, files - files_of_the_map())) == []


def test_the_map_of_tests_has_every_test() -> None:
    assert sorted(map(page_name, set(TESTS.rglob("test_*.py")) - named_in_the_map())) == []


# -- forge and registry


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=page_name)
def test_forge_files_are_yaml(path: Path) -> None:
    assert yaml.safe_load(path.read_text())


def test_workflows_run_what_a_contributor_runs() -> None:
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    targets = re.findall(r"run: make (\w+)", text)
    assert set(targets) == {"lint", "test"}
    assert all(f"\n{target}: " in (ROOT / "Makefile").read_text() for target in targets)


def test_bug_form_asks_for_what_finds_a_fault() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    required = {field["id"] for field in form["body"] if field.get("validations", {}).get("required")}
    assert required >= {"doctor", "workflow", "log", "comfyui"}
    assert "python -m sp_core doctor" in str(form)


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
