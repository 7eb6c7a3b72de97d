"""What a forward costs on how many devices: a model of time, from shapes and measured rates.

A rank computes the linear layers of its own tokens, and attention of its own heads over all
tokens. It exchanges the bytes of :mod:`sp_core.planner.traffic` at the link's rate. The slowest
rank counts. Nothing is assumed to overlap, with two exceptions: what a ring passes on hides
behind the attention of the block at hand, and what groups of heads hide is in
:mod:`sp_core.planner.overlap`.

Sources: DeepSpeed-Ulysses (arXiv 2309.14509) for the bytes of an exchange, USP (arXiv
2405.07719) for Ulysses and ring together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..layout import FlatLayout
from .degrees import Degrees
from .traffic import CrossAttention, ForwardShape, forward_bytes


@dataclass(frozen=True)
class ModelShape:
    """One architecture at one size.

    ``linear_flops`` is FLOP for each token and block outside attention, 2 for each weight that a
    token meets. ``out_channels`` are those of the output's tokens, ``itemsize`` is bytes for each element.
    """

    name: str
    blocks: int
    heads: int
    head_dim: int
    linear_flops: float
    out_channels: int = 64
    itemsize: int = 2
    cross: CrossAttention | None = None

    @property
    def width(self) -> int:
        """Width of attention, heads * head_dim."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class MeasuredRates:
    """Sustained rates of one device and its link.

    ``flops`` is FLOP/s in the model's precision, ``bandwidth`` the bytes/s that every device can
    send at the same time, and ``latency_s`` the seconds of one collective that sends next to nothing.
    ``beside``: a device can compute meanwhile, see :attr:`sp_core.comm.transport.Transport.beside`.
    """

    name: str
    flops: float
    bandwidth: float
    latency_s: float = 40e-6
    beside: bool = False

    def exchange_s(self, sent_bytes: float, collectives: int) -> float:
        """Seconds in which a device sends so many bytes in so many collectives."""
        return sent_bytes / self.bandwidth + collectives * self.latency_s

    def describe(self) -> str:
        """For a log line."""
        return f"{self.flops:.3g} FLOP/s, {self.bandwidth:.3g} bytes/s, {self.latency_s:.3g} s a collective"


@dataclass(frozen=True)
class Cost:
    """Seconds of one forward on the slowest rank."""

    compute_s: float
    exchange_s: float
    latency_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exchange_s + self.latency_s


def predict(shape: ModelShape, tokens: int, conditionings: int, rates: MeasuredRates, degrees: Degrees) -> Cost:
    """Cost of one forward of ``conditionings`` batch rows of ``tokens`` tokens each.

    Raises:
        ValueError: the batch does not divide by ``degrees.cfg``.
    """
    if conditionings % degrees.cfg:
        raise ValueError(f"{conditionings} conditionings cannot be split into {degrees.cfg} equal parts")
    rows, ranks = conditionings // degrees.cfg, degrees.ring * degrees.ulysses
    layout = FlatLayout(tokens, ranks)
    linear_s = rows * shape.blocks * max(layout.counts) * shape.linear_flops / rates.flops
    heads = math.ceil(shape.heads / degrees.ulysses)
    queries = math.ceil(tokens / degrees.ring)
    attention_s = rows * shape.blocks * 4.0 * queries * tokens * heads * shape.head_dim / rates.flops
    if ranks == 1:
        return Cost(linear_s + attention_s, 0.0, 0.0)
    traffic = ForwardShape(shape.blocks, shape.heads, shape.head_dim, shape.out_channels, rows, shape.itemsize, shape.itemsize, shape.cross)
    sent_s = forward_bytes(traffic, layout, 0, degrees.ring) / rates.bandwidth
    if degrees.ring > 1:
        # the Ulysses exchange within a row cannot hide behind anything; what the ring passes on can
        row = replace(traffic, cross=None)
        row_s = forward_bytes(row, FlatLayout(queries, degrees.ulysses), 0, 1) / rates.bandwidth if degrees.ulysses > 1 else 0.0
        sent_s = row_s + max(0.0, sent_s - row_s - attention_s)
    collectives = (2 if degrees.ulysses > 1 else 0) + (degrees.ring - 1) + (2 if shape.cross is not None else 0)
    return Cost(linear_s + attention_s, sent_s, shape.blocks * collectives * rates.latency_s)


def speed_up(shape: ModelShape, tokens: int, conditionings: int, rates: MeasuredRates, degrees: Degrees) -> float:
    """One device's time over that of ``degrees``."""
    one = predict(shape, tokens, conditionings, rates, Degrees()).total_s
    return one / predict(shape, tokens, conditionings, rates, degrees).total_s
