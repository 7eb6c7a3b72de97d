"""When a sampling run begins and ends on a rank, and what leaves the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sp_core.host.worker import residency as module
from sp_core.host.worker.residency import LoadedModel, Residency

GB = 10**9


class Patcher:
    """Stands for ComfyUI's ModelPatcher: notes what it is told."""

    def __init__(self, name: str, told: list[str], base: object = None) -> None:
        self.name, self.told, self.base = name, told, base or self

    def pre_run(self) -> None:
        self.told.append(f"{self.name} pre_run")

    def cleanup(self) -> None:
        self.told.append(f"{self.name} cleanup")

    def model_size(self) -> int:
        return 6 * GB

    def is_clone(self, other: Patcher) -> bool:
        return self.base is other.base

    def get_nested_additional_models(self) -> list[Any]:
        return []


class Rank:
    """One rank's residency with two models that are clones of one checkpoint, and one of another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        #: each time that the weights of all others were to leave the device, whose were not
        self.kept: list[list[str]] = []
        self.residency = Residency(SimpleNamespace(show=lambda phase: None, device="cuda"))  # type: ignore[arg-type]
        monkeypatch.setattr(self.residency, "_load", lambda patcher, needed, show_progress: self.told.append(f"{patcher.name} load"))
        monkeypatch.setattr(self.residency, "show_memory", lambda model: None)
        monkeypatch.setattr(module.comfy_memory, "is_loaded", lambda patcher: True)
        monkeypatch.setattr(module.comfy_api, "end_of_node", lambda: None)
        monkeypatch.setattr(module.comfy_memory, "models_to_load", lambda patcher: [patcher])
        monkeypatch.setattr(module.comfy_memory, "unload_others", lambda kept: self.kept.append([patcher.name for patcher in kept]))
        monkeypatch.setattr(module.comfy_memory, "unload", lambda patcher, wholly: self.told.append(f"{patcher.name} unload"))
        for name in ("a", "b"):
            self.hold(name, Patcher(name, self.told))
        self.hold("clone", Patcher("clone", self.told, self.residency["a"].patcher.base))

    def hold(self, key: str, patcher: Any) -> None:
        self.residency.hold(key, LoadedModel(patcher, SimpleNamespace()))  # type: ignore[arg-type]

    def forward(self, key: str, run: int | None) -> None:
        self.residency.activate(self.residency[key], 1.0, run)

    def finish(self, key: str) -> None:
        self.residency.end_run(self.residency[key])

    def heard(self) -> list[str]:
        heard = list(self.told)
        self.told.clear()
        return heard


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_each_run_begins_and_ends_once_and_the_model_stays_loaded(rank: Rank) -> None:
    for _ in range(2):
        rank.forward("a", 1)
    assert rank.heard() == ["a load", "a pre_run"]
    rank.finish("a")
    assert rank.heard() == ["a cleanup"]
    rank.forward("a", 2)
    assert "a pre_run" in rank.heard()
    rank.forward("a", 3)
    assert rank.heard() == ["a cleanup", "a pre_run"], "a run whose end was not told ends with the next one"


def test_a_run_that_did_not_begin_here_does_not_end_here(rank: Rank) -> None:
    rank.forward("a", None)
    rank.finish("a")
    rank.residency.end_run(None)
    assert rank.heard() == ["a load"]


def test_two_models_that_take_turns_begin_once_each(rank: Rank) -> None:
    for key in ("a", "b", "a", "b"):
        rank.forward(key, {"a": 1, "b": 2}[key])
    assert rank.heard() == ["a load", "a pre_run", "b load", "b pre_run", "a load", "b load"]


def test_a_graph_that_is_replayed_in_the_middle_of_a_run_goes_on_with_it(rank: Rank) -> None:
    rank.forward("a", 1)
    rank.hold("a", rank.residency["a"].patcher)
    rank.forward("a", 1)
    assert rank.heard() == ["a load", "a pre_run"]
    rank.hold("a", Patcher("other", rank.told))
    rank.forward("a", 1)
    assert rank.heard() == ["a cleanup", "other load", "other pre_run"]


@pytest.mark.parametrize("drop", ["let_go_of_all_but", "forget_all_but"])
def test_a_model_that_is_dropped_ends_its_run(rank: Rank, drop: str) -> None:
    rank.forward("a", 1)
    getattr(rank.residency, drop)(["b"])
    assert "a cleanup" in rank.heard() and rank.residency.keys == ["b"]


def test_weights_that_a_clone_computes_with_stay_on_the_device(rank: Rank) -> None:
    rank.forward("clone", 1)
    rank.residency.release(rank.residency["a"], wholly=True)
    assert "a unload" not in rank.heard()
    rank.residency.release(rank.residency["b"], wholly=True)
    rank.residency.release(rank.residency["clone"], wholly=True)
    assert rank.heard() == ["b unload", "clone unload"]


def test_a_release_takes_weights_off_the_device_that_no_model_here_needs(rank: Rank) -> None:
    rank.residency.let_go_of_all_but(["a", "b"])
    rank.residency.release(None, wholly=True)
    assert rank.heard() == [] and rank.kept == [["a", "b"]]


@pytest.mark.parametrize(("free", "stays"), [(8 * GB, ["b", "clone"]), (5 * GB, ["clone"]), (1 * GB, [])])
def test_shared_weights_of_other_models_make_way_as_far_as_they_must(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, free: int, stays: list[str]
) -> None:
    """Of 3 GB each, where the model that comes takes 7 GB with its activations."""
    others = [rank.residency[key] for key in ("b", "clone")]
    for other in others:
        other.shared = SimpleNamespace(nbytes=3 * GB)
    monkeypatch.setattr(module.comfy_memory, "free_memory", lambda device: free + 3 * GB * sum(other.shared is None for other in others))
    monkeypatch.setattr(module.comfy_memory, "give_back_freed", lambda: rank.told.append("given back"))
    rank.residency.activate(rank.residency["a"], 1.0 * GB, 1)
    assert [key for key in ("b", "clone") if rank.residency[key].shared is not None] == stays
    assert rank.heard() == ["given back"] * (2 - len(stays)) + ["a load", "a pre_run"]
