"""Chooses the parallel degrees of a forward, and says why. Pure functions.

A user never has to name a degree, but may ask for some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .cost import Cost, MeasuredRates, ModelShape, predict
from .degrees import NOTHING_REQUESTED, Degrees, RequestedDegrees, matching
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

    def line(self, layout: str, transport: str) -> str:
        """ "8 devices: CFG 2 x Ulysses 4, tiles 2x2, nccl, predicted 1.31 s a forward, one device 9.8 s"."""
        text = f"{self.devices} devices: {self.degrees.describe()}, {layout}, {transport}"
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
    """
    fitting = candidates(world_size, conditionings, requested)
    heads = shape.heads if shape is not None and may_ring else world_size
    if not requested.ring:
        fitting = _fewest_rings(fitting, heads)
    if shape is None or rates is None or not tokens:
        degrees = min(fitting, key=lambda degrees: (degrees.ring, -degrees.cfg))
        return DegreeChoice(degrees, world_size, groups=requested_groups(groups, degrees))

    def cost(degrees: Degrees) -> Cost:
        return _cost_and_groups(shape, tokens, conditionings, rates, degrees, groups)[0]

    best = min(fitting, key=lambda degrees: (cost(degrees).total_s, degrees.ring))
    if may_idle and requested == NOTHING_REQUESTED:
        sizes = (candidates(size, conditionings) for size in range(1, world_size))
        smaller = [degrees for of_size in sizes for degrees in _fewest_rings(of_size, heads)]
        rival = min(smaller, key=lambda degrees: (cost(degrees).total_s, degrees.ranks), default=best)
        if cost(rival).total_s * MARGIN < cost(best).total_s:
            best = rival
    predicted, chosen = _cost_and_groups(shape, tokens, conditionings, rates, best, groups)
    return DegreeChoice(best, world_size, predicted, cost(Degrees()), chosen)


def _cost_and_groups(
    shape: ModelShape, tokens: int, conditionings: int, rates: MeasuredRates, degrees: Degrees, requested: int
) -> tuple[Cost, GroupChoice]:
    alone, rows = predict(shape, tokens, conditionings, rates, degrees), conditionings // degrees.cfg
    groups = requested_groups(requested, degrees) if requested else choose_groups(shape, tokens, rows, rates, degrees)
    if not rates.beside:
        return alone, groups
    return replace(alone, exchange_s=alone.exchange_s - hidden_s(shape, tokens, rows, rates, degrees, groups.groups)), groups
