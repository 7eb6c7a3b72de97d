"""How much memory the host's choice to batch conditionings goes by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_core.host import comfy_api
from sp_core.host.ui.remote_model import RemoteModel, headroom_for_activations
from sp_core.plans import plan_named
from sp_core.pool.devices import WorkerDevice
from sp_core.pool.shared_buffer import SharedBuffer
from sp_core.pool.shared_state import SharedState

GB = 1 << 30


@pytest.mark.parametrize(
    ("free", "spare", "to_come", "headroom"),
    [
        (22 * GB, 0, 14 * GB, 8 * GB),  # before the first forward: worker 0's weights are still to come
        (3 * GB, 5 * GB, 0, 8 * GB),  # behind it: weights there, and torch keeps what the first step used
        (10 * GB, 0, 14 * GB, 0),
        (3 * GB, 19 * GB, 0, 22 * GB),  # dynamic VRAM: weights make way
        (4 * GB, 0, -1, 4 * GB),  # another model's weights count too
    ],
)
def test_headroom(free: int, spare: int, to_come: int, headroom: int) -> None:
    assert headroom_for_activations(free, spare, to_come) == headroom


@pytest.mark.parametrize(
    ("worker", "device", "same"),
    [
        (WorkerDevice("cuda", 0), "cuda:0", True),
        (WorkerDevice("cuda", 0), "cuda", True),
        (WorkerDevice("cuda", 1), "cuda:0", False),
        (WorkerDevice("cuda", 1), "cuda:1", True),
        (WorkerDevice("cpu", 1), "cpu", True),
        (WorkerDevice("cpu", 0), "cuda:0", False),
    ],
)
def test_which_worker_is_on_a_device(worker: WorkerDevice, device: str, same: bool) -> None:
    assert worker.is_on(torch.device(device)) == same


def test_the_headroom_is_the_same_before_and_behind_the_first_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (WorkerDevice("cuda", 1), WorkerDevice("cuda", 0))
    running: Any = None
    session: Any = SimpleNamespace(running_pool=lambda model: running)
    model = RemoteModel(session, SimpleNamespace(key="key"), devices, plan_named("WanModel"), 14 * GB)  # type: ignore[arg-type]
    buffer = SharedBuffer.create(tmp_path, "shared_state", SharedState.nbytes(2))
    pool = SimpleNamespace(devices=devices, shared_state=SharedState(buffer, 2))
    dynamic = False
    monkeypatch.setattr(comfy_api, "dynamic_vram", lambda: dynamic)

    def headroom(free: float, device: str = "cuda:0") -> float:
        return model.headroom(int(free * GB), torch.device(device)) / GB

    def worker(rank: int, weights: float, spare: float) -> None:
        pool.shared_state.ranks[rank].weight_bytes = int(weights * GB)
        pool.shared_state.ranks[rank].spare_bytes = int(spare * GB)

    assert headroom(22) == 8, "without workers all weights are still to come"
    running = pool
    worker(0, 14, 9)  # on cuda:1, which is not asked about
    assert headroom(22) == 8
    worker(1, 14, 5)
    model.stats.forward_s.append(1.0)
    assert headroom(3) == 8
    # weights that the host does not let in are not to come: 9 of 14 GB here, and 2 GB for another model are there already
    model.stats.forward_s.clear()
    model.allowance = 9.0 * GB
    worker(1, 2, 0)
    assert headroom(10) == 3
    model.stats.forward_s.append(1.0)
    worker(1, 9, 1)
    assert headroom(2) == 3
    # under dynamic VRAM weights make way
    dynamic = True
    model.stats.forward_s.clear()
    worker(1, 0, 0)
    assert headroom(22) == 22
    assert headroom(22, "cpu") == headroom(22, "cuda:2") == 22
    buffer.close()
