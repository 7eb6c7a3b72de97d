"""Chooses how the ranks share a forward, and says why. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import SPError
from .parallel import Degrees

LAYOUTS = ("auto", "flat", "tiles")


@dataclass(frozen=True)
class Pins:
    """What the user fixed: 0 and "auto" leave it to the planner.

    ``cfg``: devices a conditioning batch is split over (1 or 2).
    """

    cfg: int = 0
    ring: int = 0
    ulysses: int = 0
    layout: str = "auto"


#: nothing fixed
NO_PINS = Pins()


def possible_degrees(world_size: int) -> list[Degrees]:
    """Every dp x ring x Ulysses of a world, plainest first. dp is 1 or 2: cond and uncond."""
    found = [
        Degrees(dp, ring, world_size // dp // ring)
        for dp in (1, 2)
        if world_size % dp == 0
        for ring in range(1, world_size // dp + 1)
        if world_size // dp % ring == 0
    ]
    return sorted(found, key=lambda degrees: (degrees.ring, degrees.dp))


def check_pins(pins: Pins, world_size: int) -> None:
    """Refuse pins that no layout of ``world_size`` devices meets.

    Raises:
        SPError: names the nearest layouts that are possible.
    """
    if pins.layout not in LAYOUTS:
        raise SPError(f"'{pins.layout}' is no layout; there are {', '.join(LAYOUTS)}")
    if not matching(pins, world_size):
        nearest = sorted(possible_degrees(world_size), key=lambda degrees: _distance(pins, degrees))[:3]
        wanted = Degrees(max(pins.cfg, 1), max(pins.ring, 1), max(pins.ulysses, 1)).describe()
        raise SPError(f"{wanted} cannot be laid over {world_size} devices. Nearest possible: {'; '.join(d.describe() for d in nearest)}")


def matching(pins: Pins, world_size: int) -> list[Degrees]:
    """The layouts that meet the pins."""
    return [
        degrees
        for degrees in possible_degrees(world_size)
        if pins.cfg in (0, degrees.dp) and pins.ring in (0, degrees.ring) and pins.ulysses in (0, degrees.ulysses)
    ]


def _distance(pins: Pins, degrees: Degrees) -> int:
    pairs = ((pins.cfg, degrees.dp), (pins.ring, degrees.ring), (pins.ulysses, degrees.ulysses))
    return sum(abs(pin - degree) for pin, degree in pairs if pin)


def choose(world_size: int, conditionings: int, pins: Pins = NO_PINS) -> Degrees:
    """Degrees for one forward.

    A pinned split of the batch holds only while there is a batch to split: a forward with one
    conditioning uses all devices for the sequence.
    """
    fitting = [degrees for degrees in matching(pins, world_size) if conditionings % degrees.dp == 0]
    if not fitting:
        fitting = [d for d in matching(Pins(0, pins.ring, 0), world_size) if d.dp == 1] or [Degrees(1, 1, world_size)]
    # halves of the batch first: they exchange nothing; then Ulysses, which sends less than a ring
    return min(fitting, key=lambda degrees: (degrees.ring, -degrees.dp))
