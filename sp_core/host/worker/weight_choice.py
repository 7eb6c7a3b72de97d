"""Whether a model's weights are shared out over the ranks of a forward, and what people are told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...parallel.groups import WeightGroup
from ...planner.choose import DegreeChoice
from ...planner.cost import MeasuredRates
from ...planner.weights import FILLED, Machine, Weights, choose_weights, shared_bytes
from ..compiled import WISH
from ..options import name_of
from . import comfy_memory
from .forward_call import ForwardCall
from .residency import LoadedModel


@dataclass(frozen=True)
class WeightsOfForward:
    """How the weights lie in one forward, and why: the end of a sentence for a person, "" where nothing is to be said."""

    shared: bool
    why: str = ""


def choice_of_weights(
    model: LoadedModel,
    call: ForwardCall,
    choice: DegreeChoice,
    whole_data: bool,
    rates: Callable[[], MeasuredRates],
    of_all_ranks: Callable[[Sequence[int]], list[list[int]]],
    run: int | None = None,
) -> WeightsOfForward:
    """How the weights are to lie in a forward of these degrees. The same on every rank, for all of it rests on equal facts.

    Collective where the ranks first have to agree on a model's bytes.

    Args:
        whole_data: every rank computes some of the forward on all tokens, so that it needs room for that.
        rates: what the ranks measured; asked only where it counts.
        of_all_ranks: gives every rank's numbers for this rank's.
        run: number of the sampling run, through which *auto* stays what it was; None outside of one.
    """
    wanted = call.requested.weights
    if wanted == "whole":
        return WeightsOfForward(False)
    if why := why_whole(model, choice.degrees.ranks):
        return WeightsOfForward(False, why if wanted == "shared" else "")
    if wanted == "shared":
        return WeightsOfForward(True)
    measured = rates()
    why = _why_auto_is_whole(model, call, choice, measured)
    if why:
        return WeightsOfForward(False, why)
    found = _by_prediction(model, call, choice, whole_data, measured, of_all_ranks)
    return found if run is None else _as_before(model, run, choice.degrees.ranks, found)


def _as_before(model: LoadedModel, run: int, ranks: int, found: WeightsOfForward) -> WeightsOfForward:
    """What *auto* was before in this run: to lay all weights anew takes longer than a forward can gain."""
    before = model.auto_was if model.auto_was is not None and model.auto_was[:2] == (run, ranks) else None
    if before is not None and before[2] != found.shared:
        return WeightsOfForward(before[2], "they lay so in the forward before, and to lay them anew takes longer than a forward gains")
    model.auto_was = (run, ranks, found.shared)
    return found


def _why_auto_is_whole(model: LoadedModel, call: ForwardCall, choice: DegreeChoice, rates: MeasuredRates) -> str:
    """Why nothing is predicted; "" where it is."""
    if not rates.memory or not rates.main_memory:
        return "auto shares them out only between devices with memory of their own"
    if call.options.get(WISH) or model.compile_wish:
        return "a compile node asks for compiled blocks, which gathered weights would not be"
    if choice.degrees.cfg > 1 and not model.plan.strict:
        return "the halves of the batch could run other blocks, and auto takes no such risk"
    return ""


def _by_prediction(
    model: LoadedModel,
    call: ForwardCall,
    choice: DegreeChoice,
    whole_data: bool,
    rates: MeasuredRates,
    of_all_ranks: Callable[[Sequence[int]], list[list[int]]],
) -> WeightsOfForward:
    """What *auto* is: whole where it fits, else what a device waits less for."""
    if model.agreed_sizes is None:
        # a quantised weight with a patch has another size where the patched one lies on the device
        own = (int(model.sizes.blocks), int(model.sizes.outside), int(model.sizes.largest))
        model.agreed_sizes = Weights(*(float(max(each)) for each in zip(*of_all_ranks(own), strict=True)))
    part = (1.0 if whole_data else choice.largest_share) / choice.degrees.cfg
    machine = Machine(choice.degrees.ranks, FILLED * rates.memory, rates.bandwidth, rates.main_memory, rates.beside)
    compute_s = 0.0 if choice.cost is None else choice.cost.total_s
    found = choose_weights(model.agreed_sizes, model.activation_bytes(call.x) * part, compute_s, machine)
    return WeightsOfForward(found.shared, found.reason)


def why_whole(model: LoadedModel, ranks: int) -> str:
    """Why this model's weights cannot be shared out over so many ranks; "" where they can."""
    if not model.plan.splits_tokens or model.unsplit:
        return "nobody knows the blocks of this model"
    if any(blocks.method != "forward" for blocks in model.plan.blocks):
        return "this model calls a block's parts one by one"
    if model.alone is not None or ranks == 1:
        return "one device computes"
    movers = comfy_memory.called_at_loading(model.patcher)
    if movers:
        return f"{' and '.join(map(name_of, movers))}, which another node has ComfyUI call when it loads the model, may move weights"
    return ""


def told_of_whole(why: str) -> dict[str, Any]:
    """What a forward's reply says of whole weights."""
    return {"gathered_bytes": 0, "device_bytes": 0, "weights": f"weights: whole on each device, as {why}" if why else ""}


def told_of_weights(model: LoadedModel, chosen: WeightsOfForward, weights: WeightGroup | None) -> dict[str, Any]:
    """What a forward's reply says of weights. ``device_bytes`` are those on each device while it computes; 0 where they are whole."""
    if weights is None or model.shared is None:
        return told_of_whole(chosen.why)
    shared, sent = model.shared, weights.transport.stats.bytes_sent
    ahead = "each block's while the one before it computes" if weights.lane is not None else "each block's before it computes"
    auto = f" ({chosen.why})" if chosen.why else ""
    kept = f"; whole: {'; '.join(shared.kept)}" if shared.kept else ""
    return {
        "gathered_bytes": sent,
        "device_bytes": int(min(model.sizes.total, shared_bytes(model.sizes, shared.ranks))),
        "weights": f"weights: shared over {shared.ranks} devices{auto}, {shared.nbytes / 1e6:.4g} MB of the blocks on each; "
        f"{sent / 1e6:.4g} MB sent a rank and forward, {ahead}{kept}",
    }
