"""The planner: which degrees exist, which is chosen, and what is said."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sp_core.errors import SPError
from sp_core.layout import Shares
from sp_core.planner.choose import candidates, choose
from sp_core.planner.cost import MeasuredRates, ModelShape, predict, speed_up
from sp_core.planner.degrees import (
    NOTHING_REQUESTED,
    Degrees,
    RequestedDegrees,
    check_requested,
    largest_part,
    possible_degrees,
    requested_shares,
)

WAN_14B = ModelShape("Wan-14B", 40, 40, 128, 22.8 * 5120**2)
LTX_2 = ModelShape("LTX-2", 48, 32, 128, 32 * 4096**2)
NVLINK = MeasuredRates("H100 NVLink", 600e12, 450e9)
PCIE = MeasuredRates("4090 PCIe P2P", 140e12, 25e9)
STAGED = MeasuredRates("4090 staged", 140e12, 10e9)
SLOW_LINK = MeasuredRates("a link like wet string", 140e12, 50e6)


@pytest.mark.parametrize("world_size", range(1, 17))
def test_all_degrees_use_every_device_once(world_size):
    found = possible_degrees(world_size)
    assert len(found) == len(set(found))
    assert {degrees.ranks for degrees in found} == {world_size}
    assert Degrees(1, 1, world_size) in found


@pytest.mark.parametrize(
    ("requested", "world_size", "message"),
    [
        (RequestedDegrees(ulysses=3), 4, "Ulysses 3 cannot be laid over 4 devices. Nearest possible: "),
        (RequestedDegrees(cfg=2), 3, "CFG 2 cannot be laid over 3 devices"),
        (RequestedDegrees(ring=2, ulysses=2), 8, None),
        (RequestedDegrees(cfg=1, ring=3, ulysses=2), 8, "ring 3 x Ulysses 2 cannot be laid over 8 devices"),
        (RequestedDegrees(ring=-1), 4, "'-1' is no value for ring: it is a number of devices"),
        (RequestedDegrees(cfg="2"), 4, "'2' is no value for cfg_split"),
        (RequestedDegrees(ulysses=2.0), 4, "'2.0' is no value for ulysses"),
        (RequestedDegrees(layout="spiral"), 4, "'spiral' is no layout; there are auto, flat, tiles"),
        (RequestedDegrees(cfg=2, ring=2, ulysses=2), 8, None),
        (RequestedDegrees(shares="3,1"), 2, None),
        (RequestedDegrees(shares=" equal"), 2, None),
        (RequestedDegrees(shares="3,1"), 3, "The shares 3,1 are 2 numbers, but there are 3 devices; give one number for each device"),
        (RequestedDegrees(shares="3"), 3, "The shares 3 are 1 number, but there are 3 devices"),
        (RequestedDegrees(shares="3,0"), 2, "to leave a device out, take it out of devices"),
        (RequestedDegrees(shares="fast,slow"), 2, "'fast,slow' is no value for shares: it is auto, equal, or a number for each device"),
        (RequestedDegrees(shares="3,"), 2, "'3,' is no value for shares"),
        (RequestedDegrees(shares=31), 2, "'31' is no value for shares"),
        (RequestedDegrees(shares="5000,1"), 2, "differ by more than 1000 times"),
        (NOTHING_REQUESTED, 7, None),
    ],
)
def test_impossible_requests_are_refused_with_what_is_possible(requested, world_size, message):
    if message is None:
        check_requested(requested, world_size)
    else:
        with pytest.raises(SPError, match=message):
            check_requested(requested, world_size)


@pytest.mark.parametrize(
    ("world_size", "conditionings", "requested", "expected"),
    [
        (2, 2, NOTHING_REQUESTED, Degrees(2, 1, 1)),
        (2, 1, NOTHING_REQUESTED, Degrees(1, 1, 2)),
        (3, 2, NOTHING_REQUESTED, Degrees(1, 1, 3)),
        (8, 2, NOTHING_REQUESTED, Degrees(2, 1, 4)),
        (8, 3, NOTHING_REQUESTED, Degrees(1, 1, 8)),
        (8, 2, RequestedDegrees(cfg=1), Degrees(1, 1, 8)),
        (8, 2, RequestedDegrees(ring=2), Degrees(2, 2, 2)),
        # a second stage at CFG 1 has nothing to halve: all devices share the sequence
        (8, 1, RequestedDegrees(cfg=2), Degrees(1, 1, 8)),
        (8, 1, RequestedDegrees(cfg=2, ring=2), Degrees(1, 2, 4)),
    ],
)
@pytest.mark.parametrize("knows", [False, True], ids=["blind", "measured"])
def test_choice(world_size, conditionings, requested, expected, knows):
    known = {"shape": WAN_14B, "tokens": 75_600, "rates": PCIE} if knows else {}
    assert choose(world_size, conditionings, requested, **known).degrees == expected


def test_a_ring_only_where_ranks_would_have_no_head():
    few_heads = ModelShape("few", 30, 6, 128, 24 * 768**2)
    decide = lambda **more: choose(8, 1, shape=few_heads, tokens=30_000, rates=NVLINK, **more).degrees  # noqa: E731
    assert decide() == Degrees(1, 2, 4)
    assert decide(may_ring=False) == Degrees(1, 1, 8)
    assert choose(8, 1, shape=WAN_14B, tokens=30_000, rates=NVLINK).degrees == Degrees(1, 1, 8)


def test_devices_stay_idle_where_more_would_be_slower():
    decision = choose(4, 1, shape=LTX_2, tokens=2_000, rates=SLOW_LINK, may_idle=True)
    assert decision.degrees == Degrees()
    assert "3 idle, since more devices would be slower at this size" in decision.line("flat", "gloo")
    stubborn = choose(4, 1, shape=LTX_2, tokens=2_000, rates=SLOW_LINK)
    assert stubborn.degrees.ranks == 4
    assert "one device would be faster" in stubborn.line("flat", "gloo")
    # with two conditionings halves exchange nothing, so two of the four pay
    assert choose(4, 2, shape=LTX_2, tokens=2_000, rates=SLOW_LINK, may_idle=True).degrees == Degrees(2, 1, 1)
    # what was requested is the user's word
    assert choose(4, 1, RequestedDegrees(ulysses=4), shape=LTX_2, tokens=2_000, rates=SLOW_LINK, may_idle=True).degrees.ranks == 4


def test_idle_devices_are_no_way_to_a_ring_that_cannot_be():
    few_heads = ModelShape("few", 30, 2, 128, 24 * 768**2)
    for world_size in range(2, 17):
        for tokens in (2_000, 30_000):
            decision = choose(world_size, 1, shape=few_heads, tokens=tokens, rates=SLOW_LINK, may_idle=True, may_ring=False)
            assert decision.degrees.ring == 1


def test_the_line_names_the_choice_and_what_is_predicted_of_it():
    decision = choose(8, 2, shape=WAN_14B, tokens=75_600, rates=NVLINK)
    line = decision.line("tiles 2x2", "nccl")
    assert line.startswith("8 devices: CFG 2 x Ulysses 4, tiles 2x2, nccl, predicted ")
    shared, alone = (float(seconds) for seconds in re.findall(r"([\d.]+) s\b", line))
    assert alone / shared == pytest.approx(speed_up(WAN_14B, 75_600, 2, NVLINK, Degrees(2, 1, 4)), rel=0.01)


def test_the_line_promises_nothing_where_nothing_is_known():
    assert choose(2, 1).line("flat", "shm") == "2 devices: Ulysses 2, flat, shm"


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("conditionings", [1, 2, 3, 4])
def test_a_candidate_always_exists_and_splits_the_batch_evenly(world_size, conditionings):
    for requested in (NOTHING_REQUESTED, RequestedDegrees(cfg=2), RequestedDegrees(ring=2), RequestedDegrees(cfg=1)):
        found = candidates(world_size, conditionings, requested)
        assert found
        assert all(conditionings % degrees.cfg == 0 and degrees.ranks == world_size for degrees in found)


#: ideal speed-ups, worked out by hand from the formula of cost.py (no overlap, 20-60 us a collective): Ulysses on 2, 4, 8 devices
IDEAL = [
    (WAN_14B, 75_600, NVLINK, (1.97, 3.92, 7.82)),
    (WAN_14B, 32_760, NVLINK, (1.96, 3.87, 7.68)),
    (WAN_14B, 75_600, PCIE, (1.90, 3.70, 7.32)),
    (WAN_14B, 32_760, STAGED, (1.63, 2.99, 5.73)),
    (ModelShape("HunyuanVideo", 60, 24, 128, 24 * 3072**2), 119_056, PCIE, (1.92, 3.77, 7.47)),
    (ModelShape("Wan2.2-5B", 30, 24, 128, 22.8 * 3072**2), 27_280, NVLINK, (1.94, 3.83, 7.57)),
]


@pytest.mark.parametrize(("shape", "tokens", "rates", "expected"), IDEAL, ids=lambda value: getattr(value, "name", None))
def test_predictions_match_the_formula_worked_out_by_hand(shape, tokens, rates, expected):
    for ranks, ideal in zip((2, 4, 8), expected, strict=True):
        assert speed_up(shape, tokens, 1, rates, Degrees(1, 1, ranks)) == pytest.approx(ideal, rel=0.02)


def test_uneven_heads_cost_what_the_fullest_rank_has():
    even = predict(WAN_14B, 75_600, 1, NVLINK, Degrees(1, 1, 8)).compute_s
    one = predict(WAN_14B, 75_600, 1, NVLINK, Degrees()).compute_s
    assert even == pytest.approx(one / 8)
    # 40 heads on 16 ranks: the fullest has 3 of 2.5
    attention_share = 4 * 75_600 * 5120 / (4 * 75_600 * 5120 + WAN_14B.linear_flops)
    sixteen = predict(WAN_14B, 75_600, 1, NVLINK, Degrees(1, 1, 16)).compute_s
    assert sixteen == pytest.approx(one / 16 * (1 + attention_share * 0.2), rel=1e-3)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="3 conditionings cannot be split into 2 equal parts"):
        predict(WAN_14B, 1000, 3, NVLINK, Degrees(2, 1, 1))


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("auto", None),
        ("equal", None),
        ("2,2", None),
        ("3,1", Shares.of((3, 1))),
        (" 6, 2 ", Shares.of((3, 1))),
        ("1.5,0.5", Shares.of((3, 1))),
        ("2,1,1", Shares.of((2, 1, 1))),
    ],
)
def test_what_a_user_names_as_shares(text, shares):
    assert requested_shares(text, text.count(",") + 1) == shares


@pytest.mark.parametrize(("shares", "part"), [("auto", 0.5), ("equal", 0.5), ("2,2", 0.5), ("3,1", 0.75)])
def test_the_largest_part_that_a_device_may_get(shares: str, part: float) -> None:
    assert largest_part(shares, 2) == part


@pytest.mark.parametrize(
    ("weights", "requested", "expected"),
    [
        ((3, 1), RequestedDegrees(shares="3,1"), Degrees(1, 1, 2)),  # halves of the batch would get the same
        ((3, 1), RequestedDegrees(cfg=2, shares="3,1"), Degrees(2, 1, 1)),
        ((3, 1, 1, 3), RequestedDegrees(shares="3,1,1,3"), Degrees(2, 1, 2)),
    ],
)
@pytest.mark.parametrize("knows", [False, True], ids=["blind", "measured"])
def test_choice_with_named_shares(weights, requested, expected, knows):
    known = {"shape": WAN_14B, "tokens": 75_600, "rates": PCIE} if knows else {}
    choice = choose(len(weights), 2, requested, shares=Shares.of(weights), **known)
    assert choice.degrees == expected
    told = "" if expected.cfg == 2 and expected.ulysses == 1 else f"shares {':'.join(map(str, weights))}"
    assert choice.shares == (Shares.of(weights) if told else None)
    assert told in choice.line("flat", "nccl") and (told or "shares" not in choice.line("flat", "nccl"))


def test_ranks_that_are_said_to_be_equal_cost_what_they_cost_unsaid():
    same = replace(PCIE, linear=(PCIE.flops,) * 4, attention=(PCIE.flops,) * 4)
    for degrees in possible_degrees(4):
        plain, said = (predict(WAN_14B, 75_600, 2, rates, degrees) for rates in (PCIE, same))
        assert (said.compute_s, said.exchange_s, said.latency_s) == pytest.approx((plain.compute_s, plain.exchange_s, plain.latency_s))


def test_shares_by_speed_are_faster_than_equal_ones():
    mixed = replace(PCIE, linear=(140e12, 70e12), attention=(140e12, 70e12))
    equal, by_speed = (predict(WAN_14B, 75_600, 1, mixed, Degrees(1, 1, 2), shares) for shares in (None, Shares.of((2, 1))))
    one = predict(WAN_14B, 75_600, 1, replace(PCIE), Degrees())
    assert equal.compute_s == pytest.approx(one.compute_s)  # the slow rank takes as long for its half as the fast one for all
    assert by_speed.compute_s == pytest.approx(one.compute_s * 2 / 3, rel=0.02)  # 27 and 13 heads
