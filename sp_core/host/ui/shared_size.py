"""How many bytes of a model's weights each device holds, as ComfyUI's process counts them before the workers have told."""

from __future__ import annotations

from torch import nn

from ...planner.degrees import RequestedDegrees
from ...planner.weights import Weights, shared_bytes
from ...plans import SequencePlan
from ...weights import shareable_bytes


def device_bytes(plan: SequencePlan, model: nn.Module, total: int, requested: RequestedDegrees, devices: int) -> int:
    """``total`` where the weights are whole or nobody knows yet; else what is outside the blocks, a part of these, and two of them."""
    if requested.weights != "shared" or not plan.splits_tokens:
        return total
    blocks = [float(shareable_bytes(block)) for block in plan.blocks_of(model)]
    return min(total, int(shared_bytes(Weights.of(blocks, total), devices)))
