"""All the ways in which the ranks of a pool can share one forward: dp x ring x Ulysses.

Groups and transports are made when a layout is first used and kept, so a run that changes
from one layout to another and back makes nothing new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ..attention.sequence_group import SequenceGroup
from ..comm import Transport, TransportStats
from ..comm.ring import Ring
from ..comm.small_collectives import all_gather_ints
from ..planner.degrees import Degrees
from .mesh import Mesh, MeshAxis, Meshes

#: a group of ranks -> what moves tensors between them
MakeTransport = Callable[[dist.ProcessGroup], Transport]


@dataclass(frozen=True)
class ParallelGroups:
    """One layout as one rank sees it."""

    degrees: Degrees
    sequence: SequenceGroup
    #: joins the ranks that hold the same tokens of different batch parts; None without dp
    batch: Transport | None


class ParallelGroupsCache:
    """Makes and keeps :class:`ParallelGroups` layouts over the first ranks of the world."""

    def __init__(self, make_transport: MakeTransport, timeout: timedelta) -> None:
        """``timeout``: of the collectives of all groups."""
        self._make = make_transport
        self._meshes = Meshes(timeout)
        self._built: dict[Degrees, ParallelGroups | None] = {}
        self._transports: dict[tuple[int, ...], Transport] = {}
        self.stats = TransportStats()

    def build(self, degrees: Degrees) -> ParallelGroups | None:
        """The layout over the first ``degrees.ranks`` ranks; None on a rank that stays idle.

        Collective over the world when the layout is new: ranks that stay idle must ask for it too.
        """
        if degrees not in self._built:
            mesh = self._meshes.build(degrees.dp, degrees.ring, degrees.ulysses)
            self._built[degrees] = None if mesh is None else self._layout(degrees, mesh)
        return self._built[degrees]

    def _layout(self, degrees: Degrees, mesh: Mesh) -> ParallelGroups:
        whole = self._transport(mesh.sp)
        row = self._transport(mesh.ulysses)
        ring = Ring(mesh.ring.group, self.stats) if degrees.ring > 1 else None
        batch = self._transport(mesh.dp) if degrees.dp > 1 else None
        return ParallelGroups(degrees, SequenceGroup(whole, row, ring), batch)

    def _transport(self, axis: MeshAxis) -> Transport:
        if axis.ranks not in self._transports:
            transport = self._make(axis.group)
            transport.stats = self.stats
            self._transports[axis.ranks] = transport
        return self._transports[axis.ranks]

    def renew(self) -> None:
        """After a failure, which ranks may have left at different places: all anew. Collective over the world."""
        self.close()
        self._meshes.catch_up(max(count for (count,) in all_gather_ints(None, [self._meshes.asked])))

    def trim(self) -> None:
        """Give back device memory that the next exchanges can take again. Collective."""
        for transport in self._transports.values():
            transport.trim()

    def close(self) -> None:
        """Give back all layouts, transports and groups. Those built before are dead afterwards."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        self._built.clear()
        self._meshes.close()
