"""What people read of the models is made from the plans; here it is compared with what is in the repository."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from sp_core.plans import PLANS

ROOT = Path(__file__).resolve().parents[2]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_texts", ROOT / "tools" / "make_texts.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = load_tool()
PAGES = [str(path.relative_to(ROOT)) for path in TOOL.texts(PLANS.values())]
PLACES = {
    "web/docs/SPModelPatch.md",
    "web/docs/SPModelPatch/zh.md",
    "locales/en/nodeDefs.json",
    "locales/zh/nodeDefs.json",
}


def test_the_places_with_names_of_models_are_found() -> None:
    assert set(PAGES) >= PLACES
    assert any("<!-- models table -->" in (ROOT / page).read_text() for page in PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_text_is_the_one_that_the_plans_make(page: str) -> None:
    assert (ROOT / page).read_text() == TOOL.texts(PLANS.values())[ROOT / page], "run: python tools/make_texts.py"


@pytest.mark.parametrize("page", PAGES)
def test_a_new_architecture_would_make_it_stale(page: str) -> None:
    new = replace(PLANS["WanModel"], architecture="MadeUpModel", title="Made Up 7", covers="nothing")
    made = TOOL.texts([*PLANS.values(), new])[ROOT / page]
    assert made != (ROOT / page).read_text()
    assert made.count("Made Up 7") == 1


def test_a_tooltip_without_a_list_is_refused() -> None:
    text = '{"SPModelPatch": {"inputs": {"model": {"tooltip": "A model"}}}}'
    with pytest.raises(ValueError, match="locales/zh: the tooltip"):
        TOOL.node_definitions(text, PLANS.values(), "zh")


def test_the_table_of_node_packs_is_what_their_test_expects() -> None:
    path, made = TOOL.packs_page()
    assert "<!-- packs table -->" in made
    assert path.read_text() == made, "run: python tools/make_texts.py"
