"""A batched call is split between its conditionings, and only there."""

from __future__ import annotations

import torch

from sp_core.host.worker.cfg_split import part_of_call
from sp_core.host.worker.forward_call import ForwardCall
from sp_core.planner.degrees import NOTHING_REQUESTED


def test_parts_of_a_call() -> None:
    """Four rows of two conditionings each in the order of the batch."""
    x = torch.arange(4.0).reshape(4, 1)
    call = ForwardCall(
        "forward",
        {"x": [x, x + 10], "timestep": (x.flatten(), {"frames": x + 20}), "scale": torch.tensor(3.0)},
        {"context": x + 30, "shared": torch.zeros(3, 4), "name": "wan", "nothing": None},
        {"cond_or_uncond": [1, 0], "uuids": ["a", "b"], "sigmas": [4, 3]},
        NOTHING_REQUESTED,
    )
    parts = [part_of_call(call, part, 2) for part in (0, 1)]
    for part, rows in zip(parts, ([0, 1], [2, 3]), strict=True):
        first, second = part.named["x"]
        plain, frames = part.named["timestep"]
        assert first.flatten().tolist() == rows and second.flatten().tolist() == [row + 10 for row in rows]
        assert plain.tolist() == rows and frames["frames"].flatten().tolist() == [row + 20 for row in rows]
        assert part.extra["context"].flatten().tolist() == [row + 30 for row in rows]
        # what has no row for each conditioning belongs to both
        assert part.named["scale"] is call.named["scale"] and part.extra["shared"] is call.extra["shared"]
        assert part.extra["name"] == "wan" and part.extra["nothing"] is None
        assert part.method == "forward" and part.options["sigmas"] == [4, 3]
    assert [part.options["cond_or_uncond"] for part in parts] == [[1], [0]]
    assert [part.options["uuids"] for part in parts] == [["a"], ["b"]]
    assert [part.conditionings for part in parts] == [1, 1] and call.conditionings == 2
    assert call.options["uuids"] == ["a", "b"], "the call itself is as it was"
