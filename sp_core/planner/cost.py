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

from ..layout import FlatLayout, Shares, Weights, shard_sizes
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
    ``linear`` and ``attention`` are FLOP/s of each rank, and ``room`` the bytes that its activations can have, where ranks differ;
    empty where they do not.
    ``beside``: a device can compute meanwhile, see :attr:`sp_core.comm.transport.Transport.beside`.
    ``memory`` is bytes of the smallest device and ``main_memory`` the bytes/s that every device reads from main memory at the same
    time; 0 where nobody knows, as for CPU ranks.
    """

    name: str
    flops: float
    bandwidth: float
    latency_s: float = 40e-6
    beside: bool = False
    linear: tuple[float, ...] = ()
    attention: tuple[float, ...] = ()
    room: tuple[float, ...] = ()
    memory: float = 0.0
    main_memory: float = 0.0

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


def predict(
    shape: ModelShape, tokens: int, conditionings: int, rates: MeasuredRates, degrees: Degrees, shares: Shares | None = None
) -> Cost:
    """Cost of one forward of ``conditionings`` batch rows of ``tokens`` tokens each; ``shares`` are those of all ranks.

    Raises:
        ValueError: the batch does not divide by ``degrees.cfg``.
    """
    if conditionings % degrees.cfg:
        raise ValueError(f"{conditionings} conditionings cannot be split into {degrees.cfg} equal parts")
    rows, ranks = conditionings // degrees.cfg, degrees.ring * degrees.ulysses
    if shares is not None or rates.linear:
        return _of_unequal_ranks(shape, tokens, rows, rates, degrees, shares)
    layout = FlatLayout(tokens, ranks)
    linear_s = rows * shape.blocks * max(layout.counts) * shape.linear_flops / rates.flops
    heads = math.ceil(shape.heads / degrees.ulysses)
    queries = math.ceil(tokens / degrees.ring)
    attention_s = rows * shape.blocks * 4.0 * queries * tokens * heads * shape.head_dim / rates.flops
    if ranks == 1:
        return Cost(linear_s + attention_s, 0.0, 0.0)
    traffic = _traffic(shape, rows)
    sent_s = forward_bytes(traffic, layout, 0, degrees.ring) / rates.bandwidth
    sent_s = _exposed_s(traffic, sent_s, attention_s, queries, rates, degrees)
    return Cost(linear_s + attention_s, sent_s, _latency_s(shape, rates, degrees))


def _of_unequal_ranks(shape: ModelShape, tokens: int, rows: int, rates: MeasuredRates, degrees: Degrees, shares: Shares | None) -> Cost:
    """The slowest part of the batch. Its ranks wait for each other before and behind each attention."""
    ranks, costs, traffic = degrees.ring * degrees.ulysses, [], _traffic(shape, rows)
    for first in range(0, degrees.ranks, ranks):
        computing = [rank_compute_s(shape, tokens, rows, rates, degrees, shares, first + rank) for rank in range(ranks)]
        linear_s, attention_s = (max(seconds) for seconds in zip(*computing, strict=True))
        layout, heads_by = _shared_out(tokens, degrees, shares, first)
        sent = max(forward_bytes(traffic, layout, rank, degrees.ring, heads_by) for rank in range(ranks)) if ranks > 1 else 0
        sent_s = _exposed_s(traffic, sent / rates.bandwidth, attention_s, math.ceil(tokens / degrees.ring), rates, degrees)
        costs.append(Cost(linear_s + attention_s, sent_s, _latency_s(shape, rates, degrees) if ranks > 1 else 0.0))
    return max(costs, key=lambda cost: cost.total_s)


def rank_compute_s(
    shape: ModelShape, tokens: int, rows: int, rates: MeasuredRates, degrees: Degrees, shares: Shares | None, rank: int
) -> tuple[float, float]:
    """Seconds of the linear layers and of the attention of one forward on ``rank``, by its own rates.

    Args:
        rows: of the batch, that each part has.
        shares: of all ranks.
    """
    ranks = degrees.ring * degrees.ulysses
    first, place = rank // ranks * ranks, rank % ranks
    layout, heads_by = _shared_out(tokens, degrees, shares, first)
    row, column = divmod(place, degrees.ulysses)
    queries = sum(layout.counts[row * degrees.ulysses : (row + 1) * degrees.ulysses])
    heads = shard_sizes(shape.heads, degrees.ulysses, heads_by)[column]
    linear, attention = (rate[rank] if rate else rates.flops for rate in (rates.linear, rates.attention))
    each = rows * shape.blocks
    return (
        each * layout.counts[place] * shape.linear_flops / linear,
        each * 4.0 * queries * tokens * heads * shape.head_dim / attention,
    )


def _shared_out(tokens: int, degrees: Degrees, shares: Shares | None, first: int) -> tuple[FlatLayout, Weights | None]:
    """Tokens of the part of the batch whose ranks begin at ``first``, and the weights of the heads of its rows."""
    ranks = degrees.ring * degrees.ulysses
    part = None if shares is None else shares.part(first, first + ranks)
    if part is None:
        return FlatLayout(tokens, ranks), None
    return FlatLayout(tokens, ranks, part.tokens), part.of_columns(degrees.ring)


def _exposed_s(traffic: ForwardShape, sent_s: float, attention_s: float, queries: int, rates: MeasuredRates, degrees: Degrees) -> float:
    """Seconds of an exchange that nothing hides: what a ring passes on hides behind attention, the exchange within a row does not."""
    if degrees.ring == 1:
        return sent_s
    row = replace(traffic, cross=None)
    row_s = forward_bytes(row, FlatLayout(queries, degrees.ulysses), 0, 1) / rates.bandwidth if degrees.ulysses > 1 else 0.0
    return row_s + max(0.0, sent_s - row_s - attention_s)


def _traffic(shape: ModelShape, rows: int) -> ForwardShape:
    return ForwardShape(shape.blocks, shape.heads, shape.head_dim, shape.out_channels, rows, shape.itemsize, shape.itemsize, shape.cross)


def _latency_s(shape: ModelShape, rates: MeasuredRates, degrees: Degrees) -> float:
    collectives = (2 if degrees.ulysses > 1 else 0) + (degrees.ring - 1) + (2 if shape.cross is not None else 0)
    return shape.blocks * collectives * rates.latency_s


def speed_up(shape: ModelShape, tokens: int, conditionings: int, rates: MeasuredRates, degrees: Degrees) -> float:
    """One device's time over that of ``degrees``."""
    one = predict(shape, tokens, conditionings, rates, Degrees()).total_s
    return one / predict(shape, tokens, conditionings, rates, degrees).total_s
