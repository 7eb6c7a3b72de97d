"""Every class of diffusion model that ComfyUI knows is in the table of docs/models.md, with how it is shared out."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sp_core.plans import NOT_SAMPLED, PLANS, plan_of

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COVERAGE = tool("model_coverage")


@pytest.fixture
def model_base(comfyui_here: str) -> ModuleType:
    from comfy import model_base

    return model_base


def test_no_class_is_missing(model_base: ModuleType) -> None:
    """What the source of ComfyUI names as a diffusion model is a class of the table, and each has a way."""
    source = Path(model_base.__file__).read_text()
    named = {name.rpartition(".")[2] for name in re.findall(r"unet_model\s*=\s*(\w[\w.]*)", source)} - {"unet_model"}
    found = COVERAGE.classes(model_base)
    print("\n" + COVERAGE.table(model_base))
    assert named == {kind.__name__ for kind in found} and len(found) > 30
    assert {COVERAGE.how(kind) for kind in found} == {COVERAGE.PLAN, COVERAGE.ROWS, COVERAGE.ONE_DEVICE}


def test_every_class_gets_what_the_table_says(model_base: ModuleType) -> None:
    for kind in COVERAGE.classes(model_base):
        plan, how = plan_of(kind), COVERAGE.how(kind)
        assert plan.splits_tokens is (how == COVERAGE.PLAN), kind
        assert callable(getattr(kind, plan.forward)), kind
        assert all(callable(getattr(kind, method)) for method in plan.weight_methods), kind
    assert PLANS.keys() - {"LongCatVideoModel", "LongCatAvatarModel"} <= {kind.__name__ for kind in COVERAGE.classes(model_base)}


def test_a_new_class_appears_by_itself(model_base: ModuleType, tmp_path: Path) -> None:
    """A ComfyUI with one more model: a class that names its diffusion model, and one that builds on it."""
    path = tmp_path / "newer_model_base.py"
    path.write_text(
        "import torch\nfrom comfy.model_base import BaseModel\n\n"
        "class Tomorrow(torch.nn.Module):\n    def forward(self, x, t, **kwargs):\n        return x\n\n"
        "class NewModel(BaseModel):\n    def __init__(self, config, device=None):\n"
        "        super().__init__(config, device=device, unet_model=Tomorrow)\n\n"
        "class NewerModel(NewModel):\n    pass\n"
    )
    spec = importlib.util.spec_from_file_location("newer_model_base", path)
    assert spec is not None and spec.loader is not None
    newer = importlib.util.module_from_spec(spec)
    sys.modules["newer_model_base"] = newer
    try:
        spec.loader.exec_module(newer)
        found = {kind.__name__: names for kind, names in COVERAGE.classes(newer).items()}
    finally:
        del sys.modules["newer_model_base"]
    assert found["Tomorrow"] == ["NewModel", "NewerModel"]
    assert COVERAGE.how(newer.Tomorrow) == COVERAGE.ROWS and not plan_of(newer.Tomorrow).splits_tokens


def test_the_page_is_that_of_this_comfyui(model_base: ModuleType) -> None:
    from comfyui_version import __version__

    page = (ROOT / "docs" / "models.md").read_text()
    if f"ComfyUI {__version__}:" not in page:
        pytest.skip(f"docs/models.md is of another ComfyUI than {__version__}")
    assert COVERAGE.table(model_base) in page, "run python tools/make_texts.py"


@pytest.mark.parametrize("name", NOT_SAMPLED)
def test_what_nothing_samples_stays_as_it_is(name: str, comfyui_here: str, caplog: pytest.LogCaptureFixture) -> None:
    from sp_core.host.ui.patch_node import patch_model

    model = SimpleNamespace(model=SimpleNamespace(diffusion_model=type(name, (), {})()))
    with caplog.at_level("INFO"):
        assert patch_model(model, "cpu:2", {}, "1") is model
    assert f"nothing samples {name}" in caplog.text
