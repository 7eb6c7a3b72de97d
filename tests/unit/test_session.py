"""Which models and which nodes the workers keep while ComfyUI makes, samples and drops MODELs."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sp_core.host.ui import session as module
from sp_core.host.ui.computed_values import AboutModels, ComputedValues
from sp_core.host.ui.recipe import Recipe, names_of_loaders, trace
from sp_core.host.ui.session import Session
from sp_core.pool.devices import WorkerDevice
from sp_core.pool.errors import WorkerFailed

NOTHING = ComputedValues(lambda node_id: None, AboutModels(lambda a, b: False, lambda a, b: False, lambda model, weights: {}))
DEVICES = (WorkerDevice("cpu", 0), WorkerDevice("cpu", 1))


class Workers:
    """Stands for a pool: holds what it is told to hold."""

    devices, usable, over, out_of_step, world_size = DEVICES, True, False, False, 2

    def __init__(self) -> None:
        self.models: set[str] = set()
        self.cache: set[str] = set()
        self.operations: list[str] = []
        self.fails = False

    def call(self, operation: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        if operation == "digests":
            return {"by_rank": []}
        self.operations.append(operation)
        if operation == "load":
            self.models, self.cache = self.models & set(body["keep"]), set(body["graph"])
            if self.fails:
                raise WorkerFailed(0, "no such file")
            self.models.add(body["key"])
        if operation == "keep":
            self.models, self.cache = self.models & set(body["keys"]), set(body["graph"])
        return {"resident": sorted(self.models)}


class Model:
    """Stands for a RemoteModel."""

    devices, must_replay, weight_bytes, plan = DEVICES, True, 0, SimpleNamespace(architecture="WanModel")

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe


class Comfy:
    """Stands for ComfyUI's process: a prompt that runs, or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session, self.workers = Session(), Workers()
        self.running: set[str] = set()
        self.prompt: dict[str, Any] = {}
        monkeypatch.setattr(module.comfy_api, "running_prompts", lambda: set(self.running))
        monkeypatch.setattr(module, "POLL_S", 0.01)
        monkeypatch.setattr(self.session, "_ready", lambda devices: self.workers)
        self.session._pool = self.workers  # type: ignore[assignment]

    def begin(self, prompt_id: str, **strengths: float) -> None:
        """A prompt with a LoRA of some strength behind a loader of each name."""
        self.running = {prompt_id}
        self.prompt = {}
        for name, strength in strengths.items():
            self.prompt[name] = {"class_type": "Loader", "inputs": {"name": name}}
            self.prompt[f"{name}-lora"] = {"class_type": "Lora", "inputs": {"model": [name, 0], "strength": strength}}

    def patch(self, name: str) -> Any:
        model = Model(trace(self.prompt.__getitem__, [f"{name}-lora", 0], NOTHING))
        self.session.register(model, names_of_loaders(self.prompt.values()))  # type: ignore[arg-type]
        return model

    def sampled(self, name: str) -> Any:
        model = self.patch(name)
        self.session.ensure(model)
        return model

    def end(self) -> None:
        self.running = set()
        wait_for_threads()

    def cached_loaders(self) -> int:
        return sum(name.startswith("Loader") for name in self.workers.cache)


def wait_for_threads() -> None:
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "sp-forget":
            thread.join(5)


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> Comfy:
    return Comfy(monkeypatch)


def test_a_model_that_was_patched_and_not_sampled_is_part_of_the_next_load(comfy: Comfy) -> None:
    comfy.begin("one", high=1.0, low=1.0)
    low = comfy.patch("low")
    high = comfy.sampled("high")
    assert comfy.workers.operations == ["load"] and comfy.workers.models == {high.recipe.key}
    assert set(high.recipe.graph) | set(low.recipe.graph) == comfy.workers.cache


def test_a_changed_strength_keeps_the_loaders_of_models_that_are_yet_to_come(comfy: Comfy) -> None:
    comfy.begin("one", a=1.0, b=1.0, c=1.0)
    models = [comfy.sampled(name) for name in "abc"]
    comfy.begin("two", a=0.5, b=0.5, c=0.5)
    models.clear()
    gc.collect()
    for name in "abc":
        models.append(comfy.sampled(name))
        assert comfy.cached_loaders() == 3
        assert models[-1].recipe.key in comfy.workers.models
    comfy.end()
    assert comfy.workers.models == {model.recipe.key for model in models}
    assert "keep" not in comfy.workers.operations


def test_a_loader_that_the_prompt_does_not_have_goes_before_another_is_loaded(comfy: Comfy) -> None:
    comfy.begin("one", a=1.0)
    model = comfy.sampled("a")
    comfy.begin("two", b=1.0)
    del model
    gc.collect()
    other = comfy.sampled("b")
    assert comfy.workers.models == {other.recipe.key} and comfy.cached_loaders() == 1
    comfy.end()


def test_a_dropped_model_leaves_the_devices_at_once_and_main_memory_behind_the_prompt(comfy: Comfy) -> None:
    comfy.begin("one", a=1.0)
    model = comfy.sampled("a")
    comfy.begin("two", a=1.0)
    key = model.recipe.key
    del model
    gc.collect()
    deadline = time.monotonic() + 5
    while len(comfy.workers.operations) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert comfy.workers.operations == ["load", "release"] and comfy.workers.models == {key}
    comfy.end()
    assert comfy.workers.operations == ["load", "release", "keep"] and not comfy.workers.models and not comfy.workers.cache


def test_a_model_that_is_dropped_between_prompts_goes_at_once(comfy: Comfy) -> None:
    comfy.begin("one", a=1.0)
    model = comfy.sampled("a")
    comfy.end()
    del model
    wait_for_threads()
    assert not comfy.workers.models and not comfy.workers.cache


def test_a_loader_that_was_kept_in_vain_goes_behind_the_prompt(comfy: Comfy) -> None:
    comfy.begin("one", a=1.0, b=1.0)
    models = [comfy.sampled("a"), comfy.sampled("b")]
    comfy.begin("two", a=0.5, b=0.5)
    models.clear()
    gc.collect()
    model = comfy.sampled("a")
    assert comfy.cached_loaders() == 2
    comfy.end()
    assert comfy.workers.cache == set(model.recipe.graph)


def test_a_failed_load_leaves_what_comfyui_holds(comfy: Comfy) -> None:
    comfy.begin("one", a=1.0, b=1.0)
    model = comfy.sampled("a")
    comfy.workers.fails = True
    other = comfy.patch("b")
    with pytest.raises(RuntimeError, match="no such file"):
        comfy.session.ensure(other)
    assert comfy.session.holds(model) and not comfy.session.holds(other)
    comfy.end()
