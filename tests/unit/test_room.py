"""How much memory the host's choice to batch conditionings goes by."""

from __future__ import annotations

import pytest
import torch

from sp_core.host.model import room_for_activations
from sp_core.pool.devices import WorkerDevice

GB = 1 << 30


@pytest.mark.parametrize(
    ("free", "spare", "to_come", "room"),
    [
        (22 * GB, 0, 14 * GB, 8 * GB),  # before the first step: worker 0's weights are still to come
        (3 * GB, 5 * GB, 0, 8 * GB),  # behind it: weights there, and torch keeps what the first step used
        (10 * GB, 0, 14 * GB, 0),  # the host offloads what does not fit
        (3 * GB, 19 * GB, 0, 22 * GB),  # dynamic VRAM: weights make way
        (4 * GB, 0, -1, 4 * GB),  # another model's weights count too
    ],
)
def test_room(free: int, spare: int, to_come: int, room: int) -> None:
    assert room_for_activations(free, spare, to_come) == room


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
