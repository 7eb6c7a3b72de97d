"""A worker decides once for equal facts, and anew when one of them changes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sp_core.host.worker.decide import Decider
from sp_core.host.worker.forward_call import ForwardCall
from sp_core.host.worker.residency import LoadedModel, Residency
from sp_core.planner.cost import MeasuredRates
from sp_core.planner.degrees import NOTHING_REQUESTED, Degrees, RequestedDegrees
from sp_core.plans import Attention, SequencePlan
from sp_core.reference import ReferenceConfig
from sp_core.reference.model import AudioVideoDiT
from sp_core.reference.plan import REFERENCE

FAST = MeasuredRates("fast", 1e12, 1e12, 0.0)
#: each collective takes a second
SLOW = MeasuredRates("slow", 1e15, 1e3, 1.0)
CUDA = torch.device("cuda")


def loaded(plan: SequencePlan = REFERENCE, **config: Any) -> LoadedModel:
    model = AudioVideoDiT(ReferenceConfig(**config))
    for block in model.blocks:
        # the host's attentions say this of themselves, and the planner reads it there
        block.video_self.head_dim = model.config.head_dim  # type: ignore[union-attr, assignment]
    return LoadedModel(SimpleNamespace(model=SimpleNamespace(diffusion_model=model), model_options={}, object_patches={}), plan)


def call(frames: int = 3, requested: RequestedDegrees = NOTHING_REQUESTED, conditionings: int = 1) -> ForwardCall:
    x = torch.zeros(conditionings, 16, frames, 8, 8)
    return ForwardCall("forward", {"x": x}, {}, {"cond_or_uncond": list(range(conditionings))}, requested)


def decider(rates: MeasuredRates = FAST, device: torch.device = CUDA, world_size: int = 4) -> Decider:
    return Decider(world_size, device, lambda dtype: rates)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The modules whose parameters somebody iterates."""
    seen: list[str] = []
    named_parameters = nn.Module.named_parameters

    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(module).__name__)
        return named_parameters(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_parameters", watched)
    return seen


def test_no_parameter_is_iterated_in_a_second_forward(walks: list[str]) -> None:
    decide, model = decider(), loaded()
    decide.choice(model, call())
    assert walks.count("Block") == ReferenceConfig().layers, "the first forward has to know the model's shape"
    walks.clear()
    # nor where the forward is another one
    for other in (call(), call(frames=9), call(requested=RequestedDegrees(ulysses=4))):
        decide.choice(model, other)
    assert walks == []


def test_the_rates_are_measured_once_for_each_dtype() -> None:
    measured: list[torch.dtype] = []

    def measure(dtype: torch.dtype) -> MeasuredRates:
        measured.append(dtype)
        return FAST

    decide = Decider(4, CUDA, measure)
    for frames in (3, 9):
        decide.choice(loaded(), call(frames))
    assert measured == [torch.float32]
    for _ in range(2):
        decide.rates(torch.bfloat16)
    assert measured == [torch.float32, torch.bfloat16]


def test_equal_facts_give_the_same_choice() -> None:
    decide, model = decider(), loaded()
    first = decide.choice(model, call())
    assert decide.choice(model, call()) is first
    # a graph that is replayed again gives an equal model
    assert decide.choice(loaded(), call()) is first


@pytest.mark.parametrize(
    "other",
    [call(frames=9), call(conditionings=2), call(requested=RequestedDegrees(cfg=1, ring=2))],
    ids=["tokens", "conditionings", "requested"],
)
def test_another_forward_is_another_choice(other: ForwardCall) -> None:
    decide, model = decider(), loaded()
    first = decide.choice(model, call())
    changed = decide.choice(model, other)
    assert changed is not first
    assert changed == decider().choice(model, other), "and the one that a worker makes that never saw the first"
    assert decide.choice(model, call()) is first


def test_changed_requests_change_the_degrees() -> None:
    decide, model = decider(), loaded()
    assert decide.choice(model, call()).degrees == Degrees(1, 1, 4)
    assert decide.choice(model, call(requested=RequestedDegrees(ring=2))).degrees == Degrees(1, 2, 2)
    assert decide.choice(model, call(requested=RequestedDegrees(ring=4))).degrees == Degrees(1, 4, 1)


def test_another_model_is_another_choice() -> None:
    """With 2 heads, Ulysses on 4 ranks would leave two without one."""
    decide = decider()
    assert decide.choice(loaded(heads=5), call()).degrees == Degrees(1, 1, 4)
    assert decide.choice(loaded(heads=2), call()).degrees == Degrees(1, 2, 2)


def test_other_rates_are_another_choice() -> None:
    decide, model = decider(), loaded()
    assert decide.choice(model, call()).degrees.ranks == 4
    decide.rates = lambda dtype: SLOW  # type: ignore[method-assign]
    assert decide.choice(model, call()).degrees.ranks == 1


def test_what_may_not_idle_or_ring_does_not() -> None:
    assert decider(SLOW).choice(loaded(), call()).degrees.ranks == 1
    assert decider(SLOW, torch.device("cpu")).choice(loaded(), call()).degrees.ranks == 4, "CPU workers all work"
    joint = SequencePlan("AudioVideoDiT", "a plan of this test", REFERENCE.blocks, (), after_run="forget")
    assert decider(SLOW).choice(loaded(joint), call()).degrees.ranks == 4, "a model that keeps something is always split alike"
    assert decider().choice(loaded(joint), call(conditionings=2)).degrees.cfg == 1
    few_heads = loaded(heads=2)
    few_heads.patcher.model_options["transformer_options"] = {"optimized_attention_override": print}
    assert decider().choice(few_heads, call()).degrees == Degrees(1, 1, 4), "another pack's attention gives no log-sum-exp"


def test_another_model_under_the_same_key_has_its_own_shape() -> None:
    residency = Residency(SimpleNamespace())  # type: ignore[arg-type]
    first, second = loaded(layers=2), loaded(layers=3)
    residency.hold("key", first)
    assert residency["key"].shape is not None and residency["key"].shape.blocks == 2
    residency.hold("key", second)
    assert residency["key"].shape is not None and residency["key"].shape.blocks == 3
    residency.hold("other", first)
    assert residency.keys == ["key", "other"]
    residency.let_go_of_all_but(["other"])
    assert residency.keys == ["other"]


def test_heads_go_in_groups_where_the_link_leaves_the_device_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 heads on 2 ranks: no more than two groups, of which each gives both a head."""
    model, long = loaded(heads=5, head_dim=64), call()
    for beside, expected in ((False, 1), (True, 2)):
        rates = MeasuredRates("slow devices on a slow link", 1.0, 0.1, 0.0, beside)
        assert decider(rates, torch.device("cpu"), world_size=2).choice(model, long).groups.groups == expected
    for value, expected in (("3", 3), ("1", 1)):
        monkeypatch.setenv("SP_HEAD_GROUPS", value)
        assert decider(FAST, world_size=2).choice(model, long).groups.groups == expected


def test_joint_attention_has_no_ring() -> None:
    blocks = REFERENCE.blocks[0]
    joint = SequencePlan(
        "AudioVideoDiT", "a plan of this test", (type(blocks)(blocks.path, blocks.stream, (Attention("video_self", "joint"),)),), ()
    )
    assert Decider.may_ring(loaded()) and not Decider.may_ring(loaded(joint))
