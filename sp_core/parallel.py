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
from .cost import Degrees
from .mesh import Meshes

#: a group of ranks -> what moves tensors between them
MakeTransport = Callable[[dist.ProcessGroup], Transport]


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
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._meshes: dict[int, Meshes] = {}
        self._built: dict[Degrees, Parallel | None] = {}
        self._transports: dict[tuple[int, ...], Transport] = {}
        self.stats = TransportStats()

    def build(self, degrees: Degrees) -> Parallel | None:
        """The layout over the first ``degrees.ranks`` ranks; None on a rank that stays idle.

        Collective over the ranks that take part when the layout is new: all must ask for the same.
        """
        if degrees not in self._built:
            self._built[degrees] = self._build(degrees) if self._rank < degrees.ranks else None
        return self._built[degrees]

    def _build(self, degrees: Degrees) -> Parallel:
        mesh = self._meshes_of(degrees.ranks).build(degrees.dp, degrees.ring, degrees.ulysses)
        whole = self._transport(mesh.sp.ranks, mesh.sp.group)
        row = self._transport(mesh.ulysses.ranks, mesh.ulysses.group)
        ring = Ring(mesh.ring.group, self.stats) if degrees.ring > 1 else None
        batch = self._transport(mesh.dp.ranks, mesh.dp.group) if degrees.dp > 1 else None
        return Parallel(degrees, SequenceGroup(whole, row, ring), batch)

    def _meshes_of(self, ranks: int) -> Meshes:
        if ranks not in self._meshes:
            group = dist.new_group(list(range(ranks)), use_local_synchronization=True) if ranks < self._world_size else None
            self._meshes[ranks] = Meshes(group)  # type: ignore[arg-type]
        return self._meshes[ranks]

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
        for meshes in self._meshes.values():
            meshes.close()
        self._meshes.clear()
