"""Shares by measured speed: equal devices get none, memory limits them, and they follow a rank that slows down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp_core.layout import Shares
from sp_core.planner.cost import MeasuredRates
from sp_core.planner.shares import Balance, auto_shares, in_steps, within_memory

ALIKE = MeasuredRates("alike", 100e12, 25e9)
#: the second device has half the speed in linear layers, and a quarter in attention
MIXED = replace(ALIKE, linear=(100e12, 50e12), attention=(80e12, 20e12))


def test_devices_of_one_kind_get_no_shares() -> None:
    assert auto_shares(ALIKE, 1e9) is None
    assert auto_shares(ALIKE, 1e9, Balance()) is None


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


def runs(*found: tuple[float, float]) -> list[tuple[float, ...]]:
    balance, seen = Balance(), []
    for of_run in found:
        balance = balance.after(of_run)
        seen.append(tuple(round(times, 3) for times in balance.pace))
    return seen


def test_shares_follow_a_slow_down_and_its_end_in_the_next_run() -> None:
    assert runs((1, 1), (1, 2), (1, 2), (1, 1), (1, 1)) == [(), (1, 2), (1, 2), (), ()]


def test_shares_do_not_follow_noise() -> None:
    assert runs((1, 1.1), (1.12, 1), (1, 2), (1, 2.2), (1, 1.8), (1, 2.1)) == [(), (), (1, 2), (1, 2), (1, 2), (1, 2)]


def test_ranks_that_are_all_slower_keep_their_shares() -> None:
    assert runs((3, 3), (2, 4), (5, 10)) == [(), (1, 2), (1, 2)]


def test_a_run_without_figures_changes_nothing() -> None:
    assert Balance((1, 2)).after(()) == Balance((1, 2))
    assert Balance((1, 2)).after((0, 1)) == Balance((1, 2))


def test_a_pace_makes_shares_of_devices_of_one_kind() -> None:
    assert auto_shares(ALIKE, 0, Balance((1.0, 2.0))) == Shares.of((100, 50))
    assert auto_shares(MIXED, 0, Balance((2.0, 1.0))) == Shares((100, 100), (100, 50))
