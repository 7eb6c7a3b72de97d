"""Whether a model's weights are shared out over the ranks of a forward, and what people are told of it."""

from __future__ import annotations

from typing import Any

from ...parallel.groups import WeightGroup
from ...planner.degrees import RequestedDegrees
from ..options import name_of
from . import comfy_memory
from .residency import LoadedModel


def choice_of_weights(model: LoadedModel, requested: RequestedDegrees, ranks: int) -> bool:
    """Whether a forward on ``ranks`` ranks shares the model's weights out. The same on every rank."""
    return requested.weights == "shared" and not _why_whole(model, ranks)


def _why_whole(model: LoadedModel, ranks: int) -> str:
    """Why this model's weights cannot be shared out; "" where they can."""
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


def told_of_weights(model: LoadedModel, requested: RequestedDegrees, weights: WeightGroup | None) -> dict[str, Any]:
    """What a forward's reply says of weights."""
    if weights is None or model.shared is None:
        why = _why_whole(model, 2) if requested.weights == "shared" else ""
        return {"gathered_bytes": 0, "weights": f"weights: whole on each device, as {why}" if why else ""}
    shared, sent = model.shared, weights.transport.stats.bytes_sent
    ahead = "each block's while the one before it computes" if weights.lane is not None else "each block's before it computes"
    kept = f"; whole: {'; '.join(shared.kept)}" if shared.kept else ""
    return {
        "gathered_bytes": sent,
        "weights": f"weights: shared over {shared.ranks} devices, {shared.nbytes / 1e6:.4g} MB of the blocks on each; "
        f"{sent / 1e6:.4g} MB sent a rank and forward, {ahead}{kept}",
    }
