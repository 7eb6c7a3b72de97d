"""The doctor: its sentences are honest, its picture shows what was measured."""

from __future__ import annotations

import sys

import pytest
import torch

from sp_core.doctor.heatmap import CELL, heat_map
from sp_core.doctor.verdict import EXPECTED, expectations, sentences, verdict
from sp_core.planner.cost import MeasuredRates
from sp_core.planner.typical import WEIGHTS

NVLINK = MeasuredRates("H100 NVLink", 600e12, 450e9)
STAGED = MeasuredRates("4090 without P2P", 140e12, 10e9)
STRING = MeasuredRates("a link like wet string", 600e12, 20e6)


def report(count: int, links: dict | None = None, expected: list | None = None, **devices) -> dict:
    found = {"accelerators": [{}] * count, **devices}
    default = {"reason": "nccl", "flops": 1e14, "bandwidth": 1e10, "latency_s": 4e-5}
    return {"devices": found, "links": links or default, "expected": expected or []}


@pytest.mark.parametrize("devices", [2, 3, 4, 8, 16])
def test_every_model_is_spoken_of(devices: int) -> None:
    rows = expectations(NVLINK, devices)
    assert tuple(row["model"] for row in rows) == EXPECTED
    assert all(1 <= row["speed_up"] <= devices for row in rows)


def test_a_faster_link_promises_more() -> None:
    for fast, slow in zip(expectations(NVLINK, 8), expectations(STAGED, 8), strict=True):
        assert fast["speed_up"] > slow["speed_up"]
        assert "times as fast on 8 devices" in sentences(fast, 8)


def test_an_odd_number_of_devices_that_halves_nothing_pays_for_the_exchange() -> None:
    row = next(row for row in expectations(STRING, 3, may_idle=True) if row["model"] == "LTX-2")
    assert row["devices_used"] < 3
    assert "one device is faster" in sentences({**row, "devices_used": 1}, 3)
    assert "1 would stay idle" in sentences({**row, "devices_used": 2, "speed_up": 1.9}, 3)


@pytest.mark.parametrize(("count", "words"), [(0, "no accelerator: one device is faster"), (1, "one accelerator: one device is faster")])
def test_one_device_is_called_faster(count: int, words: str) -> None:
    assert any(words in line for line in verdict(report(count)))


def test_missing_peer_access_is_named() -> None:
    lines = verdict(report(3, peer_access=[[1, 1, 0], [1, 1, 1], [0, 1, 1]]))
    assert any("No peer access between GPUs 0-2:" in line for line in lines)
    assert any("can reach every other" in line for line in verdict(report(2, peer_access=[[1, 1], [1, 1]])))


def test_what_auto_weights_would_be_is_told_with_the_reason() -> None:
    links = {"reason": "nccl", "flops": 1e14, "bandwidth": 2e10, "latency_s": 4e-5, "memory": 24e9, "main_memory": 3e9}
    lines = [line for line in verdict(report(4, links=links)) if " GB on each device; " in line]
    assert len(lines) == len(WEIGHTS)
    assert any("Wan 2.1/2.2 14B bf16" in line and "whole lacks" in line for line in lines), lines
    assert any("fp8" in line and ": whole, 14.5 GB on each device; all 14.5 GB fit" in line for line in lines), lines
    assert not any("GB on each device" in line for line in verdict(report(4)))


def test_a_pool_that_does_not_start_is_the_verdict() -> None:
    assert verdict(report(2, links={"error": "The disk is full"})) == ["No workers can be started: The disk is full"]


def test_the_picture_shows_each_pair() -> None:
    rates = [[0.0, 12e9, 25e9], [12e9, 0.0, 1e9], [25e9, 1e9, 0.0]]
    picture = heat_map(rates)
    assert picture.shape == (1, 4 * CELL, 4 * CELL, 3) and picture.min() >= 0 and picture.max() <= 1

    def corner(row: int, column: int) -> torch.Tensor:
        return picture[0, (row + 1) * CELL + 3, (column + 1) * CELL + 3]

    assert corner(0, 2).sum() > corner(0, 1).sum() > corner(1, 2).sum()
    assert torch.equal(corner(0, 1), corner(1, 0))
    assert torch.allclose(corner(1, 1), corner(0, 0)) and corner(0, 0).sum() < corner(1, 2).sum()


def test_numbers_are_written_where_pillow_is() -> None:
    pytest.importorskip("PIL", reason="Pillow comes with ComfyUI")
    picture = heat_map([[0.0, 12e9], [3e9, 0.0]])[0]

    def ink(row: int, column: int) -> int:
        cell = picture[row * CELL + 4 : (row + 1) * CELL - 4, column * CELL + 4 : (column + 1) * CELL - 4].reshape(-1, 3)
        return len(cell.unique(dim=0)) - 1

    assert ink(0, 1) and ink(2, 0), "the headings"
    assert ink(1, 2) and ink(2, 1), "the rates"
    assert not ink(0, 0) and not ink(1, 1), "a device has no link to itself"


def test_without_pillow_the_picture_has_its_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    picture = heat_map([[0.0, 12e9], [3e9, 0.0]])[0]
    assert len(picture[CELL + 4 : 2 * CELL - 4, 2 * CELL + 4 : 3 * CELL - 4].reshape(-1, 3).unique(dim=0)) == 1
    assert picture[CELL + 4, 2 * CELL + 4].sum() > picture[2 * CELL + 4, CELL + 4].sum()


def test_no_measured_link_gives_a_picture_too() -> None:
    assert heat_map([[0.0]]).shape == (1, 2 * CELL, 2 * CELL, 3)
    assert heat_map([[0.0, 0.0], [0.0, 0.0]]).isfinite().all()
