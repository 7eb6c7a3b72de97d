"""How many ranks take part in what: the parallel degrees, and those that a user asks for."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SPError

#: token layouts that a user can ask for
LAYOUTS = ("auto", "flat", "tiles")


@dataclass(frozen=True)
class Degrees:
    """How many parts: ``dp`` halves of the batch, each over ``ring`` x ``ulysses`` ranks."""

    dp: int = 1
    ring: int = 1
    ulysses: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.ring * self.ulysses

    def describe(self) -> str:
        """For reports: "CFG 2 x ring 2 x Ulysses 2", without factors of one."""
        named = (("CFG", self.dp), ("ring", self.ring), ("Ulysses", self.ulysses))
        return " x ".join(f"{name} {size}" for name, size in named if size > 1) or "one device"


@dataclass(frozen=True)
class RequestedDegrees:
    """What the user fixed: 0 and "auto" leave it to the planner.

    ``cfg``: devices a conditioning batch is split over (1 or 2).
    """

    cfg: int = 0
    ring: int = 0
    ulysses: int = 0
    layout: str = "auto"


#: nothing fixed
NOTHING_REQUESTED = RequestedDegrees()


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


def matching(requested: RequestedDegrees, world_size: int) -> list[Degrees]:
    """The layouts that meet the requested."""
    return [
        degrees
        for degrees in possible_degrees(world_size)
        if requested.cfg in (0, degrees.dp) and requested.ring in (0, degrees.ring) and requested.ulysses in (0, degrees.ulysses)
    ]


def check_requested(requested: RequestedDegrees, world_size: int) -> None:
    """Refuse requested that no layout of ``world_size`` devices meets.

    Raises:
        SPError: names the nearest layouts that are possible.
    """
    if requested.layout not in LAYOUTS:
        raise SPError(f"'{requested.layout}' is no layout; there are {', '.join(LAYOUTS)}")
    if not matching(requested, world_size):
        nearest = sorted(possible_degrees(world_size), key=lambda degrees: _distance(requested, degrees))[:3]
        wanted = Degrees(max(requested.cfg, 1), max(requested.ring, 1), max(requested.ulysses, 1)).describe()
        raise SPError(f"{wanted} cannot be laid over {world_size} devices. Nearest possible: {'; '.join(d.describe() for d in nearest)}")


def _distance(requested: RequestedDegrees, degrees: Degrees) -> int:
    pairs = ((requested.cfg, degrees.dp), (requested.ring, degrees.ring), (requested.ulysses, degrees.ulysses))
    return sum(abs(pin - degree) for pin, degree in pairs if pin)
