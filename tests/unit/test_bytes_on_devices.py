"""On which devices a patched MODEL's weights are, as ComfyUI's process knows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_core.host.ui.remote_model import RemoteModel
from sp_core.plans import plan_named
from sp_core.pool.devices import WorkerDevice

GPUS = tuple(WorkerDevice("cuda", index) for index in range(3))
EVERYWHERE = ["cuda:0", "cuda:1", "cuda:2"]


def remote(devices: tuple[WorkerDevice, ...] = GPUS, holds: bool = True) -> RemoteModel:
    session: Any = SimpleNamespace(ensure=lambda model: None, holds=lambda model: holds)
    return RemoteModel(session, SimpleNamespace(key="key"), devices, plan_named("WanModel"), 14)  # type: ignore[arg-type]


def where(model: RemoteModel) -> list[str]:
    return [name for name in EVERYWHERE if model.bytes_on_devices(torch.device(name)) == 14]


def test_weights_come_to_all_devices_and_leave_one_or_all() -> None:
    model = remote()
    assert where(model) == [] and model.bytes_on_devices() == 0
    model.prepare()
    assert where(model) == EVERYWHERE and model.bytes_on_devices() == 14
    model.left(torch.device("cuda:1"))
    assert where(model) == ["cuda:0", "cuda:2"] and model.bytes_on_devices() == 14
    model.left()
    assert where(model) == [] and model.bytes_on_devices() == 0


def test_workers_that_ended_hold_nothing() -> None:
    model = remote(holds=False)
    model.prepare()
    assert where(model) == [] and model.bytes_on_devices() == 0


@pytest.mark.parametrize(
    ("devices", "own", "further"),
    [
        (GPUS, "cuda:0", ["cuda:1", "cuda:2"]),
        (GPUS[1:], "cuda:0", ["cuda:1", "cuda:2"]),
        (GPUS, "cuda", ["cuda:1", "cuda:2"]),
        ((WorkerDevice("cpu", 0), WorkerDevice("cpu", 1)), "cpu", []),  # one device, which they share
        ((WorkerDevice("cpu", 0), WorkerDevice("cpu", 1)), "cpu:0", ["cpu:1"]),  # only a test gives the CPU an index
    ],
)
def test_further_devices_are_those_that_comfyui_does_not_sample_on(devices: tuple[WorkerDevice, ...], own: str, further: list[str]) -> None:
    assert list(map(str, remote(devices).further_devices(torch.device(own)))) == further
