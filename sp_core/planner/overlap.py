"""Into how many groups the heads of an attention go, so that exchanges run beside it: pure functions.

With G groups the exchange of one, q, k, v and result, runs while the others are attended to. Of x seconds of exchange and a of
attention, max(x/G, x - a(G-1)/G) stay exposed: the first group has to come before there is anything to do, and the last to go
when there is nothing left. Each group costs two collectives more, and its attention is shorter than that of all heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..layout import FlatLayout
from .cost import MeasuredRates, ModelShape
from .degrees import Degrees
from .traffic import attention_bytes

#: more groups hide little that fewer do not, and kernels see ever fewer heads at once
MOST_GROUPS = 8
#: an attention that is shorter is mostly the start of its kernels
LEAST_GROUP_S = 2e-3
#: what has to be gained of the time of attention and exchange, for a prediction is no measurement; and by each further group
GAIN, FURTHER_GAIN = 0.03, 0.01
_RING_MEANWHILE = "the ring passes keys and values on meanwhile"


@dataclass(frozen=True)
class GroupChoice:
    """So many groups of heads, and if it is one, why exchanges run alone; "" where that is no loss."""

    groups: int = 1
    why: str = ""

    def describe(self) -> str:
        """For the report; "" where there is nothing to tell."""
        if self.groups > 1:
            return f"exchange beside attention in {self.groups} groups of heads"
        return f"no exchange beside attention: {self.why}" if self.why else ""


ONE_GROUP = GroupChoice()


def exposed_s(exchange_s: float, attention_s: float, groups: float) -> float:
    """Seconds of an exchange that attention does not hide; ``groups`` that are all equal."""
    return max(exchange_s / groups, exchange_s - attention_s * (groups - 1) / groups)


def even_groups(heads: int, groups: int) -> float:
    """As how many equal groups unequal ones count: the largest is what nothing is beside."""
    return heads / math.ceil(heads / groups)


def best_groups(sent_s: float, latency_s: float, attention_s: float, heads_of_rank: int) -> int:
    """How many groups leave the least exposed; 1 where that gains too little.

    Args:
        sent_s: seconds that the bytes of one attention take on the link, there and back.
        latency_s: seconds of a collective that sends nothing; a group has two.
        attention_s: seconds of the attention of all heads of the rank.
    """

    def exposed(groups: int) -> float:
        return exposed_s(sent_s + 2 * groups * latency_s, attention_s, even_groups(heads_of_rank, groups))

    most = min(MOST_GROUPS, heads_of_rank, int(attention_s / LEAST_GROUP_S))
    if most < 2:
        return 1
    best, whole = 1, attention_s + exposed(1)
    for groups in range(2, most + 1):
        needed = GAIN if best == 1 else FURTHER_GAIN * (groups - best)
        if exposed(groups) + needed * whole <= exposed(best):
            best = groups
    return best


def choose_groups(shape: ModelShape, tokens: int, rows: int, rates: MeasuredRates, degrees: Degrees) -> GroupChoice:
    """For one forward in which each rank has ``rows`` rows of the batch."""
    if degrees.ulysses == 1 or not rates.beside:
        return ONE_GROUP
    if degrees.ring > 1:
        return GroupChoice(why=_RING_MEANWHILE)
    sent_s, attention_s = _layer(shape, tokens, rows, rates, degrees)
    return GroupChoice(best_groups(sent_s, rates.latency_s, attention_s, shape.heads // degrees.ulysses))


def requested_groups(groups: int, degrees: Degrees) -> GroupChoice:
    """As many groups as a user asked for, where there can be some."""
    if groups < 2 or degrees.ulysses == 1:
        return ONE_GROUP
    return GroupChoice(groups) if degrees.ring == 1 else GroupChoice(why=_RING_MEANWHILE)


def hidden_s(shape: ModelShape, tokens: int, rows: int, rates: MeasuredRates, degrees: Degrees, groups: int) -> float:
    """Seconds of a whole forward that groups save against one exchange of all heads; may be negative."""
    if groups == 1 or degrees.ring > 1 or degrees.ulysses == 1:
        return 0.0
    sent_s, attention_s = _layer(shape, tokens, rows, rates, degrees)
    heads = shape.heads // degrees.ulysses
    groups = max(1, min(groups, heads))
    alone, exchange_s = sent_s + 2 * rates.latency_s, sent_s + 2 * groups * rates.latency_s
    return shape.blocks * (alone - exposed_s(exchange_s, attention_s, even_groups(max(1, heads), groups)))


def _layer(shape: ModelShape, tokens: int, rows: int, rates: MeasuredRates, degrees: Degrees) -> tuple[float, float]:
    """Seconds of the exchange's bytes, and of the attention, of one block on the slowest rank."""
    counts = FlatLayout(tokens, degrees.ulysses).counts
    sent = attention_bytes(counts, 0, 1, shape.heads, shape.head_dim * rows * shape.itemsize)
    heads = math.ceil(shape.heads / degrees.ulysses)
    return sent / rates.bandwidth, rows * 4.0 * tokens * tokens * heads * shape.head_dim / rates.flops
