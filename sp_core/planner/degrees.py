"""Parallel degrees: into how many parts a forward is split in which way, and what a user asks for."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ..errors import SPError
from ..layout.shares import Shares, uneven, whole_numbers

#: token layouts that a user can ask for; what they are is in :mod:`sp_core.layout`, which of them a model has in its plan
LAYOUT_CHOICES = ("auto", "flat", "tiles")
#: how a model's weights can lie on the devices: all of them on each, or each block's bytes once over the ranks of a forward
WEIGHT_CHOICES = ("auto", "whole", "shared")


#: what a user can say of shares instead of numbers: by measured speed, or the same for each device
SHARES_WORDS = ("auto", "equal")
#: how much more one device may get than another
MOST_SHARE = 1000


@dataclass(frozen=True)
class Degrees:
    """``cfg`` parts of the batch, each on ``ring`` x ``ulysses`` ranks that share its tokens.

    The ranks of a Ulysses group exchange token shards for head shards, and a ring passes keys and values on.
    """

    cfg: int = 1
    ring: int = 1
    ulysses: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.cfg * self.ring * self.ulysses

    def describe(self) -> str:
        """For reports: "CFG 2 x ring 2 x Ulysses 2", without factors of one."""
        named = (("CFG", self.cfg), ("ring", self.ring), ("Ulysses", self.ulysses))
        return " x ".join(f"{name} {size}" for name, size in named if size > 1) or "one device"


@dataclass(frozen=True)
class RequestedDegrees:
    """What the user asked for. 0 leaves a degree to the planner, "auto" the layout of tokens to the plan.

    ``cfg`` is SP Model Patch's input ``cfg_split``: 2 splits batched conditionings, 1 does not. ``shares`` is "auto", "equal", or a
    number for each device, as "3,1".
    """

    cfg: int = 0
    ring: int = 0
    ulysses: int = 0
    layout: str = "auto"
    shares: str = "auto"
    #: one of :data:`WEIGHT_CHOICES`
    weights: str = "auto"


#: everything is left to the planner
NOTHING_REQUESTED = RequestedDegrees()


def possible_degrees(world_size: int) -> list[Degrees]:
    """All degrees that ``world_size`` ranks can have: short rings first, then those that do not split the batch.

    cfg is 1 or 2, for a positive and a negative prompt.
    """
    found = [
        Degrees(cfg, ring, world_size // cfg // ring)
        for cfg in (1, 2)
        if world_size % cfg == 0
        for ring in range(1, world_size // cfg + 1)
        if world_size // cfg % ring == 0
    ]
    return sorted(found, key=lambda degrees: (degrees.ring, degrees.cfg))


def matching(requested: RequestedDegrees, world_size: int) -> list[Degrees]:
    """The degrees of ``world_size`` ranks that agree with what the user asked for."""
    return [
        degrees
        for degrees in possible_degrees(world_size)
        if requested.cfg in (0, degrees.cfg) and requested.ring in (0, degrees.ring) and requested.ulysses in (0, degrees.ulysses)
    ]


def check_requested(requested: RequestedDegrees, world_size: int) -> None:
    """Refuse what ``world_size`` devices cannot do.

    Raises:
        SPError: there is no such layout of tokens, a degree is no number of devices, the shares are not one positive number a
            device, or no degrees agree; the message then names the nearest that are possible.
    """
    for name, value in (("cfg_split", requested.cfg), ("ring", requested.ring), ("ulysses", requested.ulysses)):
        if not isinstance(value, int) or value < 0:
            raise SPError(f"'{value}' is no value for {name}: it is a number of devices, and 0 leaves it to the planner")
    if requested.layout not in LAYOUT_CHOICES:
        raise SPError(f"'{requested.layout}' is no layout; there are {', '.join(LAYOUT_CHOICES)}")
    requested_shares(requested.shares, world_size)
    if requested.weights not in WEIGHT_CHOICES:
        raise SPError(f"'{requested.weights}' is no value for weights; there are {', '.join(WEIGHT_CHOICES)}")
    if not matching(requested, world_size):
        nearest = sorted(possible_degrees(world_size), key=lambda degrees: _distance(requested, degrees))[:3]
        wanted = Degrees(max(requested.cfg, 1), max(requested.ring, 1), max(requested.ulysses, 1)).describe()
        raise SPError(f"{wanted} cannot be laid over {world_size} devices. Nearest possible: {'; '.join(d.describe() for d in nearest)}")


def requested_shares(shares: str, world_size: int) -> Shares | None:
    """The shares that a user named, or None: "auto", "equal", and numbers that are equal.

    Raises:
        SPError: they are not one positive number a device.
    """
    if not isinstance(shares, str):  # what comes over a wire can be anything
        raise SPError(f"'{shares}' is no value for shares: it is auto, equal, or a number for each device, as 3,1")
    if shares.strip() in SHARES_WORDS:
        return None
    parts = [part.strip() for part in shares.split(",")]
    try:
        numbers = [Fraction(part) for part in parts]
    except (ValueError, ZeroDivisionError):
        raise SPError(f"'{shares}' is no value for shares: it is auto, equal, or a number for each device, as 3,1") from None
    if min(numbers) <= 0:
        raise SPError(f"The shares {shares} have a number that is not above zero: to leave a device out, take it out of devices")
    if len(numbers) != world_size:
        count = f"{len(numbers)} number{'s' * (len(numbers) > 1)}"
        raise SPError(f"The shares {shares} are {count}, but there are {world_size} devices; give one number for each device")
    if max(numbers) > MOST_SHARE * min(numbers):
        raise SPError(f"The shares {shares} differ by more than {MOST_SHARE} times: take the slowest device out of devices")
    return uneven(Shares.of(whole_numbers(numbers)))


def largest_part(shares: str, world_size: int) -> float:
    """How much of all tokens the device with the most gets, as far as the user named shares: 0.75 for "3,1"."""
    found = requested_shares(shares, world_size)
    return 1 / world_size if found is None else max(found.tokens) / sum(found.tokens)


def _distance(requested: RequestedDegrees, degrees: Degrees) -> int:
    pairs = ((requested.cfg, degrees.cfg), (requested.ring, degrees.ring), (requested.ulysses, degrees.ulysses))
    return sum(abs(asked - degree) for asked, degree in pairs if asked)
