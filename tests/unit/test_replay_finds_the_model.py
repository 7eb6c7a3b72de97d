"""Nodes that a worker replays find the shared model without what another branch put into it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from sp_core.host.worker.residency import Residency


@pytest.fixture(autouse=True)
def utils(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed of ComfyUI's own."""
    comfy, module = ModuleType("comfy"), ModuleType("comfy.utils")
    comfy.utils, module.get_attr, module.set_attr = module, getattr, setattr  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy", comfy)
    monkeypatch.setitem(sys.modules, "comfy.utils", module)


def active(found: str, **backup: str) -> tuple[Residency, SimpleNamespace]:
    model = SimpleNamespace(forward=found)
    residency = Residency(SimpleNamespace())  # type: ignore[arg-type]
    residency._active = SimpleNamespace(model=model, object_patches_backup=backup)
    return residency, model


def test_an_object_patch_is_out_while_nodes_run_and_in_again_behind_them() -> None:
    residency, model = active("patched", forward="own")
    with residency.unpatched():
        assert model.forward == "own"
    assert model.forward == "patched"


def test_it_is_in_again_behind_a_node_that_failed() -> None:
    residency, model = active("patched", forward="own")
    with pytest.raises(ValueError, match="a node"), residency.unpatched():
        raise ValueError("a node")
    assert model.forward == "patched"


def test_nothing_changes_where_nothing_is_patched() -> None:
    residency, model = active("own")
    with residency.unpatched():
        assert model.forward == "own"
    with Residency(SimpleNamespace()).unpatched():  # type: ignore[arg-type]
        pass
