"""Whole or shared weights, on machines that people have: no number in here was measured, all are assumed."""

from __future__ import annotations

import pytest

from sp_core.planner.weights import Machine, Weights, choose_weights, gather_s, shared_bytes

GB = 1e9
WAN_BF16 = Weights(27.4 * GB, 1.2 * GB, 0.69 * GB)
WAN_FP8 = Weights(13.7 * GB, 0.8 * GB, 0.35 * GB)
LTX_FP8 = Weights(18 * GB, 3 * GB, 0.38 * GB)
H3_BF16 = Weights(95 * GB, 3 * GB, 1.9 * GB)

#: two graphics cards without P2P: what one sends to the other goes through main memory
PAIR = Machine(2, 22 * GB, 10 * GB, 20 * GB)
#: four of them on a board where all share the way to main memory
FOUR_CROWDED = Machine(4, 22 * GB, 20 * GB, 5 * GB)
FOUR = Machine(4, 22 * GB, 22 * GB, 20 * GB)
EIGHT_NVLINK = Machine(8, 76 * GB, 400 * GB, 25 * GB)
TWO_NVLINK = Machine(2, 76 * GB, 400 * GB, 25 * GB)

#: (model, machine, GB of activations, seconds that a forward computes) -> shared, and what the reason says
TABLE = [
    # a forward of 720p computes for seconds: both hide, and what is missing is less than what would be gathered
    (WAN_BF16, PAIR, 3, 20, False, "whole lacks 9.6 GB"),
    (WAN_FP8, PAIR, 3, 20, False, "all 14.5 GB fit"),
    (LTX_FP8, PAIR, 3, 0.5, False, "whole lacks 2 GB"),
    (H3_BF16, PAIR, 3, 5, False, "shared lacks 35.3 GB too"),
    # main memory is the slower way, and the steps are short
    (WAN_BF16, FOUR_CROWDED, 3, 1.2, True, "shared waits 0.026 s"),
    (LTX_FP8, FOUR_CROWDED, 8, 0.7, True, "shared waits 0.014 s"),
    (WAN_BF16, FOUR, 3, 10, False, "whole lacks 9.6 GB"),
    (WAN_BF16, FOUR, 3, 0.3, False, "shared waits 0.63 s"),
    (H3_BF16, FOUR, 3, 5, False, "shared lacks 11.6 GB too"),
    (WAN_BF16, EIGHT_NVLINK, 10, 1, False, "all 28.6 GB fit"),
    (LTX_FP8, EIGHT_NVLINK, 10, 0.1, False, "all 21 GB fit"),
    (H3_BF16, EIGHT_NVLINK, 10, 0.5, True, "shared waits 0.0042 s"),
    (H3_BF16, TWO_NVLINK, 10, 0.5, True, "shared waits"),
    # two experts of which both stay on the devices
    (Weights(54.8 * GB, 2.4 * GB, 0.69 * GB), EIGHT_NVLINK, 10, 1, False, "all 57.2 GB fit"),
    (Weights(54.8 * GB, 2.4 * GB, 0.69 * GB), FOUR_CROWDED, 3, 1.2, True, "shared waits"),
]


@pytest.mark.parametrize(("weights", "machine", "activations", "compute_s", "shared", "said"), TABLE)
def test_choice(weights: Weights, machine: Machine, activations: float, compute_s: float, shared: bool, said: str) -> None:
    choice = choose_weights(weights, activations * GB, compute_s, machine)
    assert choice.shared is shared, choice
    assert said in choice.reason
    assert choice.held + activations * GB <= machine.memory + 1


def test_one_device_has_nobody_to_share_with() -> None:
    assert not choose_weights(WAN_BF16, GB, 1.0, Machine(1, 22 * GB, GB, GB)).shared


@pytest.mark.parametrize("weights", [WAN_BF16, LTX_FP8, H3_BF16])
def test_more_devices_hold_less_each(weights: Weights) -> None:
    held = [shared_bytes(weights, ranks) for ranks in (2, 4, 8)]
    assert held == sorted(held, reverse=True)


def test_only_a_link_that_works_beside_hides_anything() -> None:
    hidden, open_ = (gather_s(WAN_BF16, 100.0, Machine(4, 0, 10 * GB, 1, beside)) for beside in (True, False))
    assert hidden == pytest.approx(0.75 * 0.069) and open_ == pytest.approx(0.75 * 2.74)
