"""Whether a model's weights are whole on each device or shared over them: a pure function of sizes and measured rates.

Whole costs nothing where all of it fits beside the activations. Where it does not, ComfyUI brings what is missing from
main memory in every forward. Shared weights come from the other devices instead. Both come while a block computes, so
only what takes longer than the computing counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: to gather has to be predicted so many times as fast as main memory: a prediction is no measurement, and ComfyUI's own way is known
MARGIN = 1.25
#: of a device's memory, what weights and activations can have together
FILLED = 0.9


@dataclass(frozen=True)
class Weights:
    """Bytes of a model. ``blocks`` are what can be shared out, ``outside`` what stays whole, ``largest`` the largest block."""

    blocks: float
    outside: float
    largest: float

    @classmethod
    def of(cls, blocks: Sequence[float], total: float) -> Weights:
        """Of a model of ``total`` bytes with blocks of these sizes."""
        return cls(sum(blocks), max(0.0, total - sum(blocks)), max(blocks, default=0.0))

    @property
    def total(self) -> float:
        return self.blocks + self.outside


@dataclass(frozen=True)
class Machine:
    """What the devices of a forward have and do: the smallest memory and the slowest link count.

    Args:
        memory: bytes of a device that weights and activations can have.
        link: bytes/s that each device sends to the others at the same time.
        main_memory: bytes/s that each device reads from main memory at the same time.
        beside: a device can compute while its link carries.
    """

    ranks: int
    memory: float
    link: float
    main_memory: float
    beside: bool = True


@dataclass(frozen=True)
class WeightChoice:
    """How weights are to lie, and why.

    Args:
        held: bytes of weights on each device while a block computes.
        waits_s: seconds of a forward in which a device waits for weights.
        reason: a sentence for a person.
    """

    shared: bool
    held: float
    waits_s: float
    reason: str


def choose_weights(weights: Weights, activations: float, compute_s: float, machine: Machine) -> WeightChoice:
    """Whole where it fits, else what waits less: for main memory or for the other devices.

    Args:
        activations: bytes that a device needs beside the weights.
        compute_s: seconds of a forward in which the slowest device computes and exchanges.
    """
    missing = weights.total + activations - machine.memory
    if missing <= 0:
        return WeightChoice(False, weights.total, 0.0, f"all {_size(weights.total)} fit beside the activations")
    streams_s = max(0.0, missing / machine.main_memory - compute_s)
    whole = f"whole lacks {_size(missing)} on each device and waits {streams_s:.2g} s a forward for main memory"
    held, room = shared_bytes(weights, machine.ranks), machine.memory - activations
    if machine.ranks == 1:
        return WeightChoice(False, room, streams_s, whole)
    if held > room:
        return WeightChoice(False, room, streams_s, f"{whole}; shared lacks {_size(held - room)} too")
    gathers_s = gather_s(weights, compute_s, machine)
    shared = f"shared waits {gathers_s:.2g} s for the other devices"
    if gathers_s * MARGIN < streams_s:
        return WeightChoice(True, held, gathers_s, f"{shared}; {whole}")
    return WeightChoice(False, room, streams_s, f"{whole}; {shared}")


def shared_bytes(weights: Weights, ranks: int) -> float:
    """Bytes of weights on each device while a block computes: its part of all, and two blocks that were gathered."""
    return weights.outside + weights.blocks / ranks + 2 * weights.largest


def gather_s(weights: Weights, compute_s: float, machine: Machine) -> float:
    """Seconds of a forward in which a device waits for weights of the others: the first block's, and what computing does not hide."""
    away = (machine.ranks - 1) / machine.ranks
    all_s, first_s = away * weights.blocks / machine.link, away * weights.largest / machine.link
    return first_s + max(0.0, all_s - first_s - compute_s) if machine.beside else all_s


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB"
