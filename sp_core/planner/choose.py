"""Chooses the parallel degrees of a forward, and says why. Pure functions.

A user never has to name a degree, but may ask for some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..layout.shares import Shares
from .cost import Cost, MeasuredRates, ModelShape, predict
from .degrees import NOTHING_REQUESTED, SHARES_WORDS, Degrees, RequestedDegrees, matching
from .overlap import ONE_GROUP, GroupChoice, choose_groups, hidden_s, requested_groups

#: fewer devices must be predicted to be this many times as fast before any is left idle: a prediction is no measurement
MARGIN = 1.05


@dataclass(frozen=True)
class DegreeChoice:
    """The degrees that were chosen for ``devices`` ranks, what they are predicted to cost, and what one device would take.

    ``groups``: into how many groups the heads of an attention go, so that exchanges run beside it.
    """

    degrees: Degrees
    devices: int
    cost: Cost | None = None
    one_device: Cost | None = None
    groups: GroupChoice = ONE_GROUP
    #: of all ranks; None where each gets the same
    shares: Shares | None = None

    @property
    def largest_share(self) -> float:
        """Of the tokens of a part of the batch, what the rank with the most has."""
        size = self.degrees.ring * self.degrees.ulysses
        parts = [] if self.shares is None else [self.shares.part(first, first + size) for first in range(0, self.degrees.ranks, size)]
        return max([max(part.tokens) / sum(part.tokens) for part in parts if part is not None], default=1 / size)

    def with_shares(self, shares: Shares | None) -> DegreeChoice:
        """The same, with shares of all ranks, of which those that take part keep theirs. Unequal heads go in one exchange."""
        own = None if shares is None else shares.part(0, self.degrees.ranks)
        size = self.degrees.ring * self.degrees.ulysses
        if own is None or all(own.part(first, first + size) is None for first in range(0, self.degrees.ranks, size)):
            return self  # ranks that share tokens are equal, whatever those of other parts of the batch are
        groups = self.groups if self.groups.groups == 1 else GroupChoice(why="the devices have unequal shares of the heads")
        return replace(self, shares=own, groups=groups)

    def line(self, layout: str, transport: str) -> str:
        """ "8 devices: CFG 2 x Ulysses 4, tiles 2x2, nccl, predicted 1.31 s a forward, one device 9.8 s"."""
        text = f"{self.devices} devices: {self.degrees.describe()}, {layout}, {transport}"
        if self.shares is not None:
            text += f", {self.shares.describe()}"
        if told := self.groups.describe():
            text += f", {told}"
        if self.cost is None or self.one_device is None:
            return text
        text += f", predicted {self.cost.total_s:.3g} s a forward, one device {self.one_device.total_s:.3g} s"
        if self.degrees.ranks < self.devices:
            text += f"; {self.devices - self.degrees.ranks} idle, since more devices would be slower at this size"
        elif self.cost.total_s > self.one_device.total_s:
            text += "; one device would be faster at this size"
        return text


def candidates(world_size: int, conditionings: int, requested: RequestedDegrees = NOTHING_REQUESTED) -> list[Degrees]:
    """Degrees for exactly ``world_size`` ranks in a forward of ``conditionings`` batched conditionings. Never empty.

    A requested split of the batch holds only while there is a batch to split. A forward with one
    conditioning uses all devices for the sequence.
    """
    fitting = [degrees for degrees in matching(requested, world_size) if conditionings % degrees.cfg == 0]
    if not fitting:
        fitting = matching(RequestedDegrees(1, requested.ring), world_size) or [Degrees(1, 1, world_size)]
    return fitting


def _fewest_rings(fitting: list[Degrees], heads: int) -> list[Degrees]:
    """Of each split of the batch, the degrees with the shortest ring that still gives every rank a head."""
    kept = []
    for cfg in sorted({degrees.cfg for degrees in fitting}):
        of_split = sorted((degrees for degrees in fitting if degrees.cfg == cfg), key=lambda degrees: degrees.ring)
        kept.append(next((degrees for degrees in of_split if degrees.ulysses <= heads), of_split[0]))
    return kept


def choose(
    world_size: int,
    conditionings: int,
    requested: RequestedDegrees = NOTHING_REQUESTED,
    *,
    shape: ModelShape | None = None,
    tokens: int = 0,
    rates: MeasuredRates | None = None,
    may_idle: bool = False,
    may_ring: bool = True,
    groups: int = 0,
    shares: Shares | None = None,
) -> DegreeChoice:
    """Degrees for one forward.

    Args:
        conditionings: how many the host batched into this forward.
        requested: what the user asked for; it holds wherever it can.
        shape, tokens, rates: what a prediction needs. Without one of them, splitting the batch is preferred,
            as its parts exchange nothing, and then Ulysses, as it sends less than a ring.
        may_idle: leave devices idle where fewer are predicted to be faster, unless the user asked for degrees.
        may_ring: the local attention can be one that returns log-sum-exp. Even then a ring is chosen
            only where Ulysses would leave ranks without a head: it sends more, and its kernels see
            shorter blocks than the prediction knows of.
        groups: of heads, as the user asked for; 0 leaves them to the prediction.
        shares: of all ranks, where they do not all get the same.
    """
    fitting = _with_shares(candidates(world_size, conditionings, requested), requested, shares)
    heads = shape.heads if shape is not None and may_ring else world_size
    if not requested.ring:
        fitting = _fewest_rings(fitting, heads)
    if shape is None or rates is None or not tokens:
        degrees = min(fitting, key=lambda degrees: (degrees.ring, -degrees.cfg))
        return DegreeChoice(degrees, world_size, groups=requested_groups(groups, degrees)).with_shares(shares)

    def cost(degrees: Degrees) -> Cost:
        return _cost_and_groups(shape, tokens, conditionings, rates, degrees, groups, shares)[0]

    best = min(fitting, key=lambda degrees: (cost(degrees).total_s, degrees.ring))
    if may_idle and requested == NOTHING_REQUESTED:
        sizes = (candidates(size, conditionings) for size in range(1, world_size))
        smaller = [degrees for of_size in sizes for degrees in _fewest_rings(of_size, heads)]
        rival = min(smaller, key=lambda degrees: (cost(degrees).total_s, degrees.ranks), default=best)
        if cost(rival).total_s * MARGIN < cost(best).total_s:
            best = rival
    predicted, chosen = _cost_and_groups(shape, tokens, conditionings, rates, best, groups, shares)
    return DegreeChoice(best, world_size, predicted, cost(Degrees()), chosen).with_shares(shares)


def _with_shares(fitting: list[Degrees], requested: RequestedDegrees, shares: Shares | None) -> list[Degrees]:
    """Degrees that can give ranks the shares that a user named: each part of the batch has as many rows, whatever its ranks' shares."""
    if shares is None or requested.cfg or requested.shares in SHARES_WORDS:
        return fitting
    return [degrees for degrees in fitting if degrees.cfg == 1 or _same_for_all_parts(shares, degrees)] or fitting


def _same_for_all_parts(shares: Shares, degrees: Degrees) -> bool:
    size = degrees.ring * degrees.ulysses
    return len({sum(shares.tokens[first : first + size]) for first in range(0, degrees.ranks, size)}) == 1


def _cost_and_groups(
    shape: ModelShape,
    tokens: int,
    conditionings: int,
    rates: MeasuredRates,
    degrees: Degrees,
    requested: int,
    shares: Shares | None,
) -> tuple[Cost, GroupChoice]:
    alone, rows = predict(shape, tokens, conditionings, rates, degrees, shares), conditionings // degrees.cfg
    if shares is not None:
        return alone, requested_groups(requested, degrees)
    groups = requested_groups(requested, degrees) if requested else choose_groups(shape, tokens, rows, rates, degrees)
    if not rates.beside:
        return alone, groups
    return replace(alone, exchange_s=alone.exchange_s - hidden_s(shape, tokens, rows, rates, degrees, groups.groups)), groups
