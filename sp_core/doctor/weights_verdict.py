"""What *weights: auto* would be on the devices that were measured, in sentences. Pure functions."""

from __future__ import annotations

from ..planner.choose import choose
from ..planner.cost import MeasuredRates
from ..planner.typical import ACTIVATION_BYTES, MODELS, WEIGHTS
from ..planner.weights import FILLED, Machine, WeightChoice, choose_weights


def auto_weights(rates: MeasuredRates, devices: int) -> list[tuple[str, float, WeightChoice]]:
    """For typical models at typical sizes: what it is, bytes of its activations on a device, and how *auto* has the weights lie."""
    found = []
    sizes = {shape.name: (shape, size, tokens) for shape, size, tokens in MODELS}
    for name, dtype, weights in WEIGHTS:
        shape, size, tokens = sizes[name]
        choice = choose(devices, 1, shape=shape, tokens=tokens, rates=rates)
        assert choice.cost is not None
        activations = ACTIVATION_BYTES * tokens * shape.width * choice.largest_share
        machine = Machine(choice.degrees.ranks, FILLED * rates.memory, rates.bandwidth, rates.main_memory, rates.beside)
        found.append((f"{name} {dtype} {size}", activations, choose_weights(weights, activations, choice.cost.total_s, machine)))
    return found


def weight_sentences(rates: MeasuredRates, devices: int) -> list[str]:
    """For a person; none where the devices did not say what memory they have."""
    if devices < 2 or not rates.memory or not rates.main_memory:
        return []
    told = (
        f"{what}, {activations / 1e9:.1f} GB of activations: {'shared' if choice.shared else 'whole'}, {choice.held / 1e9:.1f} GB on each "
        f"device; {choice.reason}."
        for what, activations, choice in auto_weights(rates, devices)
    )
    read = f"{rates.main_memory / 1e9:.3g} GB/s"
    return [
        f"weights: auto on {devices} devices of {rates.memory / 1e9:.0f} GB, each of which reads main memory at {read}:",
        *(f"  {line}" for line in told),
    ]
