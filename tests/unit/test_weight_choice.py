"""Whole or shared weights, on machines that people have: no number in here was measured, all are assumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_core.host.worker import weight_choice
from sp_core.host.worker.forward_call import ForwardCall
from sp_core.host.worker.residency import LoadedModel
from sp_core.host.worker.weight_choice import WeightsOfForward, choice_of_weights
from sp_core.layout import Shares
from sp_core.planner.choose import DegreeChoice
from sp_core.planner.cost import Cost, MeasuredRates
from sp_core.planner.degrees import Degrees, RequestedDegrees
from sp_core.planner.weights import MARGIN, Machine, Weights, choose_weights, gather_s, shared_bytes
from sp_core.reference import ReferenceConfig
from sp_core.reference.model import AudioVideoDiT
from sp_core.reference.plan import REFERENCE

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


#: no exchange of GPUs is known yet to leave them free, so that every byte that is gathered is waited for
TODAY = [
    (WAN_BF16, PAIR, 3, 20, False),
    (WAN_BF16, FOUR_CROWDED, 3, 1.2, False),
    (WAN_BF16, FOUR_CROWDED, 3, 0.3, True),
    (H3_BF16, EIGHT_NVLINK, 10, 0.5, True),
    (H3_BF16, EIGHT_NVLINK, 10, 2, False),
    (LTX_FP8, EIGHT_NVLINK, 10, 0.1, False),
]


@pytest.mark.parametrize(("weights", "machine", "activations", "compute_s", "shared"), TODAY)
def test_choice_where_computing_hides_no_gather(
    weights: Weights, machine: Machine, activations: float, compute_s: float, shared: bool
) -> None:
    choice = choose_weights(weights, activations * GB, compute_s, replace(machine, beside=False))
    assert choice.shared is shared, choice


def test_one_device_has_nobody_to_share_with() -> None:
    assert not choose_weights(WAN_BF16, GB, 1.0, Machine(1, 22 * GB, GB, GB)).shared


@pytest.mark.parametrize("weights", [WAN_BF16, LTX_FP8, H3_BF16])
def test_more_devices_hold_less_each(weights: Weights) -> None:
    held = [shared_bytes(weights, ranks) for ranks in (2, 4, 8)]
    assert held == sorted(held, reverse=True)


def test_only_a_link_that_works_beside_hides_anything() -> None:
    hidden, open_ = (gather_s(WAN_BF16, 100.0, Machine(4, 0, 10 * GB, 1, beside)) for beside in (True, False))
    assert hidden == pytest.approx(0.75 * 0.069) and open_ == pytest.approx(0.75 * 2.74)


def test_a_gather_that_is_hardly_faster_is_not_worth_the_change() -> None:
    machine = Machine(4, 22 * GB, 20 * GB, 5 * GB, beside=False)
    whole_s = choose_weights(WAN_BF16, 3 * GB, 0.0, Machine(4, 22 * GB, 1.0, 5 * GB, beside=False)).waits_s
    for factor, shared in ((MARGIN * 1.01, True), (MARGIN * 0.99, False)):
        machine = Machine(4, 22 * GB, 0.75 * WAN_BF16.blocks * factor / whole_s, 5 * GB, beside=False)
        assert choose_weights(WAN_BF16, 3 * GB, 0.0, machine).shared is shared


# -- a worker's choice in a forward


#: four devices of 1 MB with a fast link, whose way to main memory is slow
SMALL = MeasuredRates("small", 1e12, 1e12, 0.0, memory=1e6, main_memory=1e3)
FOUR_RANKS = DegreeChoice(Degrees(1, 1, 4), 4, Cost(1e-3, 0.0, 0.0), Cost(4e-3, 0.0, 0.0))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """The reference model in the place of a host's."""
    inner = AudioVideoDiT(ReferenceConfig(layers=4))
    size = sum(weight.nbytes for weight in inner.parameters())
    monkeypatch.setattr(weight_choice.comfy_memory, "called_at_loading", lambda patcher: [])
    base = SimpleNamespace(diffusion_model=inner, memory_required=lambda shape: 4e5)
    return LoadedModel(SimpleNamespace(model=base, model_size=lambda: size, model_options={}), replace(REFERENCE, strict=True))


def ranks(numbers: Any) -> list[list[int]]:
    """This rank's numbers, and those of one whose blocks are smaller."""
    return [list(numbers), [numbers[0] // 2, *numbers[1:]]]


def chosen(model: LoadedModel, wanted: str = "auto", rates: MeasuredRates = SMALL, **facts: Any) -> WeightsOfForward:
    call = ForwardCall("forward", {"x": torch.zeros(1, 16, 3, 8, 8)}, {}, facts.get("options", {}), RequestedDegrees(weights=wanted))
    choice, whole_data = facts.get("choice", FOUR_RANKS), facts.get("whole_data", False)
    return choice_of_weights(model, call, choice, whole_data, lambda: rates, ranks, facts.get("run"))


def room_for(model: LoadedModel, share: float) -> MeasuredRates:
    """Devices on which whole weights fit beside so much of the activations, and no more."""
    return MeasuredRates("room", 1e12, 1e12, 0.0, memory=(model.sizes.total + share * 4e5) / 0.9 + 1, main_memory=1e3)


def test_auto_shares_out_what_does_not_fit_whole(model: LoadedModel) -> None:
    assert model.sizes.blocks > 0 and model.sizes.total == model.patcher.model_size()
    small = MeasuredRates("small", 1e12, 1e12, 0.0, memory=(0.9 * model.sizes.total + 1e5) / 0.9, main_memory=1e3)
    found = chosen(model, rates=small)
    assert found.shared and "whole lacks" in found.why
    assert not chosen(model, rates=room_for(model, 0.25)).shared
    assert "fit beside" in chosen(model, rates=room_for(model, 0.25)).why


@pytest.mark.parametrize(
    ("facts", "share"),
    [
        ({"whole_data": True}, 1.0),
        ({"choice": DegreeChoice(Degrees(2, 1, 2), 4)}, 0.25),
        ({"choice": DegreeChoice(Degrees(1, 1, 4), 4, shares=Shares.of([3, 1, 1, 1]))}, 0.5),
        ({"choice": DegreeChoice(Degrees(2, 1, 2), 4, shares=Shares.of([1, 1, 3, 1]))}, 0.375),
    ],
)
def test_room_is_left_for_the_activations_of_the_rank_with_the_most(model: LoadedModel, facts: dict[str, Any], share: float) -> None:
    assert not chosen(model, rates=room_for(model, share), **facts).shared
    assert "whole lacks" in chosen(model, rates=room_for(model, share - 0.01), **facts).why


def test_auto_stays_what_it_was_through_a_sampling_run(model: LoadedModel) -> None:
    little, much = room_for(model, 0.25), room_for(model, 0.24)
    assert not chosen(model, rates=little).shared and chosen(model, rates=much).shared
    assert not chosen(model, rates=little, run=1).shared
    kept = chosen(model, rates=much, run=1)
    assert not kept.shared and "takes longer" in kept.why
    assert chosen(model, rates=much, run=2).shared and chosen(model, rates=little, run=2).shared
    assert not chosen(model, rates=little, run=2, choice=replace(FOUR_RANKS, degrees=Degrees(1, 1, 2))).shared


def on_a_cpu(model: LoadedModel) -> WeightsOfForward:
    return chosen(model, rates=MeasuredRates("cpu", 1e10, 1e10, 0.0))


def compiled(model: LoadedModel) -> WeightsOfForward:
    model.compile_wish = {"backend": "inductor"}
    return chosen(model)


def in_halves(model: LoadedModel) -> WeightsOfForward:
    model.plan = REFERENCE
    return chosen(model, choice=DegreeChoice(Degrees(2, 1, 2), 4))


def alone(model: LoadedModel) -> WeightsOfForward:
    return chosen(model, "shared", choice=DegreeChoice(Degrees(), 4))


def without_blocks(model: LoadedModel) -> WeightsOfForward:
    model.unsplit = "here"
    return chosen(model, "shared")


WHOLE = [
    (on_a_cpu, "only between devices with memory of their own"),
    (compiled, "a compile node"),
    (in_halves, "the halves of the batch could run other blocks"),
    (alone, "one device computes"),
    (without_blocks, "nobody knows the blocks"),
]


@pytest.mark.parametrize(("case", "why"), WHOLE, ids=lambda value: getattr(value, "__name__", None))
def test_what_keeps_weights_whole_is_told(model: LoadedModel, case: Callable[[LoadedModel], WeightsOfForward], why: str) -> None:
    found = case(model)
    assert not found.shared and why in found.why


@pytest.mark.parametrize(("wanted", "shared"), [("whole", False), ("shared", True)])
def test_what_the_user_asked_for_holds_and_asks_for_no_rates(model: LoadedModel, wanted: str, shared: bool) -> None:
    call = ForwardCall("forward", {"x": torch.zeros(1, 16, 3, 8, 8)}, {}, {}, RequestedDegrees(weights=wanted))

    def unasked() -> MeasuredRates:
        raise AssertionError

    assert choice_of_weights(model, call, FOUR_RANKS, False, unasked, ranks).shared is shared
