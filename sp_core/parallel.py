"""All the ways in which the ranks of a pool can share one forward: dp x ring x Ulysses.

Groups and transports are made when a layout is first used and kept, so a run that changes
from one layout to another and back makes nothing new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from .attention.parallel import SequenceGroup
from .comm import Transport, TransportStats
from .comm.ring import Ring
from .mesh import Meshes

#: a group of ranks -> what moves tensors between them
MakeTransport = Callable[[dist.ProcessGroup], Transport]


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
class Parallel:
    """One layout as one rank sees it."""

    degrees: Degrees
    sequence: SequenceGroup
    #: joins the ranks that hold the same tokens of different batch parts; None without dp
    batch: Transport | None


class Parallels:
    """Makes and keeps :class:`Parallel` layouts over the default process group."""

    def __init__(self, make_transport: MakeTransport) -> None:
        self._make = make_transport
        self._meshes = Meshes()
        self._built: dict[Degrees, Parallel] = {}
        self._transports: dict[tuple[int, ...], Transport] = {}
        self.stats = TransportStats()

    def build(self, degrees: Degrees) -> Parallel:
        """Collective over all ranks when the layout is new: all must ask for the same."""
        if degrees not in self._built:
            mesh = self._meshes.build(degrees.dp, degrees.ring, degrees.ulysses)
            whole = self._transport(mesh.sp.ranks, mesh.sp.group)
            row = self._transport(mesh.ulysses.ranks, mesh.ulysses.group)
            ring = Ring(mesh.ring.group, self.stats) if degrees.ring > 1 else None
            batch = self._transport(mesh.dp.ranks, mesh.dp.group) if degrees.dp > 1 else None
            self._built[degrees] = Parallel(degrees, SequenceGroup(whole, row, ring), batch)
        return self._built[degrees]

    def _transport(self, ranks: tuple[int, ...], group: dist.ProcessGroup) -> Transport:
        if ranks not in self._transports:
            transport = self._make(group)
            transport.stats = self.stats
            self._transports[ranks] = transport
        return self._transports[ranks]

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        self._built.clear()
        self._meshes.close()
