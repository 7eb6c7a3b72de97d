"""Into how many groups heads go so that exchanges run beside attention, and what is said and predicted of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp_core.planner.choose import choose
from sp_core.planner.cost import MeasuredRates, ModelShape
from sp_core.planner.degrees import Degrees, RequestedDegrees
from sp_core.planner.overlap import MOST_GROUPS, best_groups, choose_groups, even_groups, exposed_s, hidden_s, requested_groups

WAN_14B = ModelShape("Wan-14B", 40, 40, 128, 22.8 * 5120**2)
PINNED = MeasuredRates("4090, by pinned memory", 140e12, 10e9, beside=True)


@pytest.mark.parametrize(
    ("exchange", "attention", "groups", "exposed"),
    [
        (1.0, 9.0, 1, 1.0),
        (1.0, 9.0, 2, 0.5),
        (1.0, 9.0, 4, 0.25),
        # a link that is slower than the attention: what does not fit beside it stays
        (9.0, 1.0, 4, 8.25),
        (1.0, 1.0, 4, 0.25),
        (1.0, 0.0, 4, 1.0),
        (0.0, 1.0, 4, 0.0),
    ],
)
def test_what_stays_exposed(exchange: float, attention: float, groups: int, exposed: float) -> None:
    assert exposed_s(exchange, attention, groups) == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("sent_ms", "latency_ms", "attention_ms", "heads", "groups"),
    [
        # hardly any exchange: nothing to gain
        (1, 0.04, 100, 20, 1),
        # half of the attention, then nearly all of it, then more than it
        (50, 0.04, 100, 20, 5),
        (90, 0.04, 100, 20, 7),
        (300, 0.04, 100, 20, 5),
        # seven groups of eight heads have a group of two, as four have
        (90, 0.04, 100, 8, 8),
        (30, 0.04, 100, 8, 4),
        # no more groups than a rank has heads
        (90, 0.04, 100, 3, 3),
        (90, 0.04, 100, 1, 1),
        # and none that is attended to in less than 2 ms
        (4, 0.04, 5, 20, 2),
        (2, 0.04, 3, 20, 1),
        # collectives that cost more than they hide
        (20, 60, 100, 20, 1),
        (0, 0, 0, 20, 1),
    ],
)
def test_the_number_of_groups(sent_ms: float, latency_ms: float, attention_ms: float, heads: int, groups: int) -> None:
    assert best_groups(sent_ms / 1e3, latency_ms / 1e3, attention_ms / 1e3, heads) == groups


def test_a_choice_never_exposes_more_than_one_exchange_of_all_heads() -> None:
    for sent in (0.0, 0.001, 0.01, 0.1, 1.0):
        for latency in (0.0, 1e-5, 1e-3, 0.1):
            for attention in (0.0, 0.003, 0.02, 0.1, 1.0):
                groups = best_groups(sent, latency, attention, 20)
                assert 1 <= groups <= MOST_GROUPS
                even = even_groups(20, groups)
                assert exposed_s(sent + 2 * groups * latency, attention, even) <= exposed_s(sent + 2 * latency, attention, 1)


@pytest.mark.parametrize(
    ("rates", "degrees", "groups", "told"),
    [
        (PINNED, Degrees(1, 1, 2), 4, "exchange beside attention in 4 groups of heads"),
        # where the processor moves the data, there is no beside
        (replace(PINNED, beside=False), Degrees(1, 1, 2), 1, ""),
        (PINNED, Degrees(2, 1, 1), 1, ""),
        (PINNED, Degrees(1, 2, 1), 1, ""),
        (PINNED, Degrees(1, 2, 2), 1, "no exchange beside attention: the ring passes keys and values on meanwhile"),
    ],
)
def test_what_is_chosen_and_told_of_wan(rates: MeasuredRates, degrees: Degrees, groups: int, told: str) -> None:
    choice = choose_groups(WAN_14B, 75_600, 1, rates, degrees)
    assert (choice.groups, choice.describe()) == (groups, told)


def test_the_line_names_the_groups_and_predicts_with_them() -> None:
    alone = choose(2, 1, shape=WAN_14B, tokens=75_600, rates=replace(PINNED, beside=False))
    beside = choose(2, 1, shape=WAN_14B, tokens=75_600, rates=PINNED)
    assert beside.line("flat", "host").startswith(
        "2 devices: Ulysses 2, flat, host, exchange beside attention in 4 groups of heads, predicted "
    )
    assert "beside" not in alone.line("flat", "host")
    assert beside.cost is not None and alone.cost is not None
    saved = hidden_s(WAN_14B, 75_600, 1, PINNED, Degrees(1, 1, 2), 4)
    assert saved > 0
    assert alone.cost.total_s - beside.cost.total_s == pytest.approx(saved)


def test_what_a_user_asks_for_holds_where_it_can() -> None:
    ulysses, ring = Degrees(1, 1, 4), Degrees(1, 2, 2)
    assert [requested_groups(groups, ulysses).groups for groups in (1, 2, 5)] == [1, 2, 5]
    assert requested_groups(4, ring).groups == 1 and "the ring" in requested_groups(4, ring).why
    # whether or not anything is known or measured
    assert choose(4, 1, groups=3).groups.groups == 3
    slow = replace(PINNED, beside=False)
    assert choose(4, 1, shape=WAN_14B, tokens=75_600, rates=slow, groups=3).groups.groups == 3
    assert choose(4, 1, RequestedDegrees(ring=2), groups=3).groups.groups == 1
    assert choose(4, 1, shape=WAN_14B, tokens=75_600, rates=PINNED, groups=1).groups.groups == 1
