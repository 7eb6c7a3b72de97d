"""Which batch rows of a call go where, what belongs to them, and when they stay together."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_core.host.worker.batch_rows import RowChoice, row_counts, rows_of_call, rows_of_options, signature, why_together
from sp_core.host.worker.forward_call import ForwardCall
from sp_core.planner.degrees import NOTHING_REQUESTED


def call(rows: int, **named: Any) -> ForwardCall:
    x = torch.arange(float(rows)).reshape(rows, 1, 1, 1)
    return ForwardCall("_forward", {"x": x, "timesteps": torch.ones(rows), **named}, {}, {}, NOTHING_REQUESTED)


def options(conditionings: int, latents: int = 1, **more: Any) -> dict[str, Any]:
    names = list(range(conditionings))
    return {"cond_or_uncond": names, "uuids": [f"u{name}" for name in names], "sigmas": torch.ones(latents), **more}


@pytest.mark.parametrize(
    ("rows", "world", "counts"), [(1, 2, (1,)), (2, 2, (1, 1)), (3, 2, (2, 1)), (2, 4, (1, 1)), (6, 4, (2, 2, 1, 1)), (7, 3, (3, 2, 2))]
)
def test_counts(rows: int, world: int, counts: tuple[int, ...]) -> None:
    assert row_counts(rows, world) == counts


@pytest.mark.parametrize(
    ("conditionings", "latents", "first", "count", "names", "sigmas"),
    [
        (2, 1, 1, 1, [1], [10.0]),
        (2, 3, 0, 3, [0], [10.0, 11.0, 12.0]),
        (2, 3, 3, 3, [1], [10.0, 11.0, 12.0]),
        (4, 2, 2, 4, [1, 2], [10.0, 11.0]),
        (2, 3, 1, 2, [0], [11.0, 12.0]),
        (2, 3, 4, 1, [1], [11.0]),
        (1, 3, 1, 2, [0], [11.0, 12.0]),
    ],
)
def test_options_of_rows(conditionings: int, latents: int, first: int, count: int, names: list[int], sigmas: list[float]) -> None:
    """Models call ``chunk(len(cond_or_uncond))``: each conditioning that is named has equally many of the rows."""
    whole = options(conditionings, latents, sample_sigmas=torch.ones(count), sigma_count=3)
    whole["sigmas"] = 10.0 + torch.arange(latents)
    own = rows_of_options(whole, conditionings * latents, first, count)
    assert own["cond_or_uncond"] == names and own["uuids"] == [f"u{name}" for name in names]
    assert own["sigmas"].tolist() == sigmas and count % len(names) == 0
    assert own["sample_sigmas"] is whole["sample_sigmas"] and own["sigma_count"] == 3
    assert whole["cond_or_uncond"] == list(range(conditionings)), "the options themselves are as they were"


def test_options_of_rows_that_cross_conditionings() -> None:
    """One latent of the first conditioning and two of the second: each row is named by itself."""
    own = rows_of_options(options(2, 3), 6, 2, 3)
    assert own["cond_or_uncond"] == [0, 1, 1] and own["uuids"] == ["u0", "u1", "u1"] and own["sigmas"].tolist() == [1.0]


def test_arguments_of_rows() -> None:
    rows = torch.arange(3.0)
    whole = call(3, control={"input": [rows, None], "middle": []}, scale=torch.tensor(2.0), mask=torch.zeros(1, 4), name="a")
    own = rows_of_call(whole, 1, 2)
    assert own.x.flatten().tolist() == [1.0, 2.0] and own.named["control"]["input"][0].tolist() == [1.0, 2.0]
    assert own.named["scale"] is whole.named["scale"] and own.named["mask"] is whole.named["mask"] and own.named["name"] == "a"
    own.named["control"]["input"].pop()
    assert len(whole.named["control"]["input"]) == 2, "a UNet takes its control from the lists"


OBJECT = object()


@pytest.mark.parametrize(
    ("the_call", "the_options", "why"),
    [
        (call(2), options(2), ""),
        (call(6), options(2, 3), ""),
        (call(2), {"cond_or_uncond": [0, 1]}, ""),
        (call(2), {}, ""),
        (call(2, control={"input": [torch.ones(2, 4), None, torch.ones(1, 4)]}), options(2), ""),
        (
            call(2),
            options(2, block=("input", 1), original_shape=None, patches={}, rope_options={"shift_t": 1.0}, model_sampling=OBJECT),
            "",
        ),
        (call(1), options(1), "and this forward has one"),
        (call(2), options(2, context_window=SimpleNamespace(dim=2)), ""),
        (call(2), options(2, context_window=SimpleNamespace(dim=0)), r"transformer_options\['context_window'\]"),
        (call(2, y=torch.ones(3, 4)), options(2), "2 of them and 3 entries of y"),
        (call(2, refs=[torch.ones(2, 1), torch.ones(4, 1)]), options(2), "4 entries of refs"),
        (call(3), options(2), "3 of them for 2 conditionings"),
        (call(2), options(2, uuids=["a"]), r"transformer_options\['uuids'\]"),
        (call(2), options(2, memory=[]), r"transformer_options\['memory'\]"),
        (call(2), options(2, ar_state={"start": 0}), r"transformer_options\['ar_state'\]"),
        (call(2), options(2, scale=torch.ones(2)), r"transformer_options\['scale'\]"),
        (call(2), options(2, thing=OBJECT), r"transformer_options\['thing'\]"),
        (call(2), options(2, sizes=(1, [2])), r"transformer_options\['sizes'\]"),
        (call(4), options(2, 2) | {"sigmas": torch.ones(3)}, r"transformer_options\['sigmas'\]"),
    ],
)
def test_when_rows_stay_together(the_call: ForwardCall, the_options: dict[str, Any], why: str) -> None:
    found = why_together(the_call, the_options, row_counts(the_call.x.size(0), 2))
    assert re.search(why, found) if why else found == "", found


def test_other_sigmas_for_each_latent() -> None:
    """Where the shares cross conditionings, each row is named by itself, and its sigma has to be that of all."""
    differing = options(2, 3) | {"sigmas": torch.arange(3.0)}
    assert why_together(call(6), differing, (3, 3)) == ""
    assert why_together(call(6), options(2, 3), (2, 2, 2)) == ""
    assert "different sigmas" in why_together(call(6), differing, (2, 2, 2))


def test_what_makes_two_forwards_of_one_kind() -> None:
    first = signature(call(2, y=torch.ones(2, 4), flag=True, number=1.5), options(2), (1, 1))
    assert first == signature(call(2, y=torch.zeros(2, 4), flag=False, number=2.5), options(2) | {"sigmas": torch.zeros(1)}, (1, 1))
    others = [
        (call(2, y=torch.ones(2, 5), flag=True, number=1.5), options(2), (1, 1)),
        (call(2, y=torch.ones(2, 4), flag=True, number=1.5), options(2), (2,)),
        (call(2, y=torch.ones(2, 4), flag=None, number=1.5), options(2), (1, 1)),
        (call(2, y=torch.ones(2, 4), flag=True, number=[1.5]), options(2), (1, 1)),
        (call(2, y=torch.ones(2, 4), flag=True, number=1.5), options(2, more=1), (1, 1)),
        (call(2, y=torch.ones(2, 4), flag=True, number=1.5, timesteps=torch.arange(2.0)), options(2), (1, 1)),
    ]
    assert first not in [signature(*other) for other in others]
    lists = [signature(call(2, sizes=[a, b]), options(2), (1, 1)) for a, b in ((1, 2), (1, 3))]
    assert lists[0] != lists[1], "a list may have a number for each row"


def test_what_people_are_told() -> None:
    without = "UNetModel has no sequence plan, so only whole batch rows can be shared out"
    assert RowChoice("UNetModel", (1, 1), 2).line("nccl") == f"2 devices: batch rows 1 + 1, nccl; {without}"
    assert RowChoice("UNetModel", (1, 1), 4).line("nccl") == f"4 devices: batch rows 1 + 1, 2 idle, nccl; {without}"
    alone = RowChoice("UNetModel", (1,), 2, "and this forward has one")
    assert alone.line("nccl") == f"2 devices: one computes all, 1 idle; {without}, and this forward has one"
    unsplit = RowChoice("NextDiT", (1, 1), 2, unsplit="with a patch between the blocks")
    told = "NextDiT's tokens are not split with a patch between the blocks, so only whole batch rows can be shared out"
    assert unsplit.line("nccl") == f"2 devices: batch rows 1 + 1, nccl; {told}"
    assert RowChoice("UNetModel", (2, 1), 2).line_of_proof.startswith("2 devices: each computes all, to see whether 2 + 1 batch rows")
