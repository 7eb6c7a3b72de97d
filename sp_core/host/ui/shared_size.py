"""How many bytes of a model's weights each device holds, as ComfyUI's process counts them."""

from __future__ import annotations

from torch import nn

from ...planner.degrees import RequestedDegrees
from ...planner.weights import Weights, shared_bytes
from ...plans import SequencePlan


def device_bytes(plan: SequencePlan, model: nn.Module, total: int, requested: RequestedDegrees, devices: int) -> int:
    """``total`` where the weights are whole; where they are shared out, what is outside the blocks, a part of these, and two of them."""
    if requested.weights != "shared" or not plan.splits_tokens:
        return total
    blocks = [sum(weight.nbytes for weight in block.parameters()) for block in plan.blocks_of(model)]
    if not blocks:
        return total
    return min(total, int(shared_bytes(Weights(sum(blocks), max(0, total - sum(blocks)), max(blocks)), devices)))
