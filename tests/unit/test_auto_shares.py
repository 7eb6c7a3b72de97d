"""Shares by measured speed: equal devices get none, and memory limits them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp_core.layout import Shares
from sp_core.planner.cost import MeasuredRates
from sp_core.planner.shares import auto_shares, in_steps, within_memory

ALIKE = MeasuredRates("alike", 100e12, 25e9)
#: the second device has half the speed in linear layers, and a quarter in attention
MIXED = replace(ALIKE, linear=(100e12, 50e12), attention=(80e12, 20e12))


def test_devices_of_one_kind_get_no_shares() -> None:
    assert auto_shares(ALIKE, 1e9) is None


def test_tokens_follow_linear_layers_and_heads_attention() -> None:
    assert auto_shares(MIXED) == Shares((100, 50), (100, 25))


def test_devices_that_differ_by_name_and_not_by_speed_get_no_shares() -> None:
    assert auto_shares(replace(ALIKE, linear=(100e12, 99.8e12), attention=(80e12, 80e12))) is None


@pytest.mark.parametrize(
    ("speeds", "room", "needed", "parts"),
    [
        ((3, 1), (), 100, [0.75, 0.25]),
        ((3, 1), (75, 25), 0, [0.75, 0.25]),
        ((3, 1), (80, 80), 100, [0.75, 0.25]),
        ((3, 1), (60, 80), 100, [0.6, 0.4]),  # the fast one is full
        ((3, 1), (30, 20), 100, [0.6, 0.4]),  # too little for all: by memory
        ((3, 1), (0, 0), 100, [0.75, 0.25]),
        ((4, 2, 2), (20, 35, 90), 100, [0.2, 0.35, 0.45]),  # what the first leaves is too much for the second
    ],
)
def test_memory_limits_a_part(speeds: tuple, room: tuple, needed: float, parts: list[float]) -> None:
    assert within_memory(speeds, room, needed) == pytest.approx(parts)


def test_memory_limits_tokens_and_not_heads() -> None:
    assert auto_shares(replace(MIXED, room=(50e9, 80e9)), 100e9) == Shares((100, 100), (100, 25))


def test_every_rank_gets_something() -> None:
    assert in_steps([1.0, 1e-6]) == (100, 1)
