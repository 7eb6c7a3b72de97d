"""Which models and which nodes the workers keep while ComfyUI makes, samples and drops MODELs."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sp_core.errors import SPError
from sp_core.host.ui import device_input
from sp_core.host.ui import session as module
from sp_core.host.ui.computed_values import AboutModels, ComputedValues
from sp_core.host.ui.pool_models import PoolModels
from sp_core.host.ui.recipe import Recipe, names_of_loaders, trace
from sp_core.host.ui.session import Session
from sp_core.pool.devices import WorkerDevice
from sp_core.pool.errors import WorkerFailed

NOTHING = ComputedValues(lambda node_id: None, AboutModels(lambda a, b: False, lambda a, b: False, lambda model, weights: {}))
DEVICES = (WorkerDevice("cpu", 0), WorkerDevice("cpu", 1))


class Workers:
    """Stands for a pool: holds what it is told to hold."""

    out_of_step, waiting = False, ()

    def __init__(self, devices: tuple[WorkerDevice, ...] = DEVICES, service: Any = None) -> None:
        self.devices, self.world_size = devices, len(devices)
        self.usable, self.over = service is None, False
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
        return {"resident": sorted(self.models), "places": []}

    def launch(self) -> None:
        pass

    def join(self, watch: Any) -> None:
        self.usable = True

    def settle(self, watch: Any) -> None:
        pass

    def shutdown(self) -> None:
        self.usable, self.over = False, True


class Model:
    """Stands for a RemoteModel."""

    is_vae, tiles_only, must_replay, weight_bytes, plan = False, False, True, 0, SimpleNamespace(architecture="WanModel")

    def __init__(self, recipe: Recipe, devices: tuple[WorkerDevice, ...] = DEVICES) -> None:
        self.recipe, self.devices = recipe, devices

    def share_memory(self, places: list[Any]) -> None:
        assert places == []


class Comfy:
    """Stands for ComfyUI's process: a prompt that runs, or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session, self.workers = Session(), Workers()
        self.running: set[str] = set()
        self.prompt: dict[str, Any] = {}
        monkeypatch.setattr(module.comfy_api, "running_prompts", lambda: set(self.running))
        monkeypatch.setattr(module.comfy_api, "running_nodes", lambda: self.nodes)
        monkeypatch.setattr(device_input, "accelerators", lambda: ("cuda", 4))
        self.nodes: list[dict[str, Any]] = []
        monkeypatch.setattr(module, "PROMPT_POLL_S", 0.01)
        monkeypatch.setattr(module, "Pool", Workers)
        monkeypatch.setattr(module, "_service", lambda devices: "service")
        self.session._pools[DEVICES] = PoolModels(self.workers, self.session._held)  # type: ignore[arg-type]

    def begin(self, prompt_id: str, **strengths: float) -> None:
        """A prompt with a LoRA of some strength behind a loader of each name."""
        self.running = {prompt_id}
        self.prompt, self.nodes = {}, []
        for name, strength in strengths.items():
            self.prompt[name] = {"class_type": "Loader", "inputs": {"name": name}}
            self.prompt[f"{name}-lora"] = {"class_type": "Lora", "inputs": {"model": [name, 0], "strength": strength}}

    def patch(self, name: str, devices: tuple[WorkerDevice, ...] = DEVICES) -> Any:
        model = Model(trace(self.prompt.__getitem__, [f"{name}-lora", 0], NOTHING), devices)
        self.session.register(model, names_of_loaders(self.prompt.values()))  # type: ignore[arg-type]
        return model

    def sampled(self, name: str, devices: tuple[WorkerDevice, ...] = DEVICES) -> Any:
        model = self.patch(name, devices)
        self.session.ensure(model)
        return model

    def names(self, *lists: Any) -> None:
        """The running prompt has SP nodes with these device lists."""
        self.nodes = [{"class_type": "SPModelPatch", "inputs": {"devices": text}} for text in lists]

    def end(self) -> None:
        self.running = set()
        wait_for_threads()

    def cached_loaders(self) -> int:
        return sum(name.startswith("Loader") for name in self.workers.cache)


def wait_for_threads() -> None:
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "sp-forget":
            thread.join(60)


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
    deadline = time.monotonic() + 60
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


# -- device lists ---------------------------------------------------------------------------


def gpus(*indices: int) -> tuple[WorkerDevice, ...]:
    return tuple(WorkerDevice("cuda", index) for index in indices)


def running(comfy: Comfy) -> set[tuple[WorkerDevice, ...]]:
    return {models.pool.devices for models in comfy.session.pools}


def test_lists_without_a_common_device_have_a_pool_each_from_prompt_to_prompt(comfy: Comfy) -> None:
    comfy.begin("one", high=1.0, low=1.0)
    high, low = comfy.sampled("high", gpus(0, 1)), comfy.sampled("low", gpus(2, 3))
    assert running(comfy) == {gpus(0, 1), gpus(2, 3)}
    pools = [comfy.session.running_pool(model) for model in (high, low)]
    comfy.end()
    comfy.begin("two", high=1.0, low=1.0)
    comfy.names("0,1", "2,3")
    assert [comfy.session.ensure(model) for model in (high, low)] == pools
    assert all(comfy.session.holds(model) for model in (high, low))
    comfy.end()


@pytest.mark.parametrize("other", [gpus(1, 2), gpus(1, 0), gpus(0, 1, 2, 3)], ids=str)
def test_lists_with_a_common_device_are_refused_in_one_prompt(comfy: Comfy, other: tuple[WorkerDevice, ...]) -> None:
    comfy.begin("one", high=1.0, low=1.0)
    high = comfy.sampled("high", gpus(0, 1))
    low = comfy.patch("low", other)
    with pytest.raises(SPError, match=r"cuda:0, cuda:1 and cuda:.* need .*cuda:1"):
        comfy.session.ensure(low)
    assert comfy.session.holds(high), "the refusal costs the first list its workers"
    comfy.end()


@pytest.mark.parametrize("other", [gpus(1, 2), gpus(2, 3)], ids=str)
def test_a_list_that_was_changed_makes_way_though_comfyui_still_holds_its_model(comfy: Comfy, other: tuple[WorkerDevice, ...]) -> None:
    comfy.begin("one", a=1.0)
    old = comfy.sampled("a", gpus(0, 1))
    first = comfy.session.running_pool(old)
    comfy.end()
    comfy.begin("two", a=1.0)
    new = comfy.sampled("a", other)
    assert running(comfy) == {other} and first is not None and first.over
    assert comfy.session.holds(new) and not comfy.session.holds(old)
    comfy.end()
    comfy.begin("three", a=1.0)  # and back, with the MODEL that was cached
    comfy.session.ensure(old)
    assert running(comfy) == {gpus(0, 1)} and comfy.session.holds(old)
    comfy.end()


@pytest.mark.parametrize(
    ("named", "stays"),
    [(["0,1", "2,3"], True), ([["17", 0], "2,3"], True), (["2,3"], False), (["0", "2,3", "9"], False)],
    ids=["named", "over a wire", "not named", "other lists"],
)
def test_a_pool_stays_for_a_prompt_that_names_its_list_and_uses_it_later(comfy: Comfy, named: list[Any], stays: bool) -> None:
    comfy.begin("one", a=1.0, b=1.0)
    comfy.sampled("a", gpus(0, 1))
    comfy.end()
    comfy.begin("two", a=1.0, b=1.0)
    comfy.names(*named)
    first, second = comfy.session.pools[0].pool, comfy.session.ensure(comfy.patch("b", gpus(2, 3)))
    assert {models.pool for models in comfy.session.pools} == ({first, second} if stays else {second})
    comfy.end()


def test_a_pool_ends_when_a_prompt_uses_another_that_runs_already(comfy: Comfy) -> None:
    comfy.begin("one", a=1.0, b=1.0)
    comfy.names("0,1", "2,3")
    models = [comfy.sampled("a", gpus(0, 1)), comfy.sampled("b", gpus(2, 3))]
    comfy.end()
    comfy.begin("two", a=1.0)
    comfy.names("0,1")
    comfy.session.ensure(models[0])
    assert running(comfy) == {gpus(0, 1)}
    comfy.end()


def test_workers_on_the_cpu_share_it(comfy: Comfy) -> None:
    three = tuple(WorkerDevice("cpu", index) for index in range(3))
    comfy.begin("one", high=1.0, low=1.0)
    models = [comfy.sampled("high"), comfy.sampled("low", three)]
    assert running(comfy) == {DEVICES, three} and all(map(comfy.session.holds, models))
    comfy.end()


def test_a_model_on_two_lists_stays_where_comfyui_holds_it(comfy: Comfy) -> None:
    comfy.begin("one", a=1.0)
    left, right = comfy.sampled("a", gpus(0, 1)), comfy.sampled("a", gpus(2, 3))
    assert left.recipe.key == right.recipe.key
    pool: Any = comfy.session.running_pool(left)
    del left
    comfy.end()
    assert comfy.session.holds(right) and not pool.models


def test_workers_of_a_prompt_that_runs_are_not_idle(comfy: Comfy) -> None:
    comfy.begin("one", a=1.0)
    model = comfy.sampled("a", gpus(0, 1))
    (models,) = comfy.session.pools
    models.pool.is_busy = lambda: busy  # type: ignore[method-assign]
    busy = False
    assert not comfy.session._end_unused(models)
    comfy.end()
    busy = True  # a block that was cancelled
    assert not comfy.session._end_unused(models)
    busy = False
    assert comfy.session._end_unused(models) and not comfy.session.pools and not comfy.session.holds(model)
