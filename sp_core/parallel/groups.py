"""The groups of ranks that share a forward, and what moves tensors within them, for any parallel degrees.

Groups and transports are made when degrees are first used, and kept, so
changing from one choice to another and back makes nothing new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..attention.sequence_group import SequenceGroup
from ..comm import Transport, TransportStats
from ..comm.lane import Lane
from ..comm.ring_shift import Ring
from ..comm.small_collectives import all_gather_ints
from ..layout import Shares
from ..planner.degrees import Degrees
from .mesh import Mesh, MeshAxis, Meshes

#: makes what moves tensors between the ranks of a group; collective over the group
MakeTransport = Callable[[dist.ProcessGroup], Transport]


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that one rank is in, for some parallel degrees."""

    degrees: Degrees
    #: the ranks that share the tokens of this rank's part of the batch
    sequence: SequenceGroup
    #: joins the ranks that hold the same tokens of different parts of the batch; None where cfg is 1
    cfg: Transport | None
    #: of the ranks of ``sequence``, for what goes from rank to rank
    sequence_group: dist.ProcessGroup

    def in_groups(self, groups: int) -> ParallelGroups:
        """The same, with so many groups of heads in every attention (:mod:`sp_core.attention.head_groups`)."""
        return replace(self, sequence=self.sequence.in_groups(groups))

    def with_shares(self, shares: Shares | None) -> ParallelGroups:
        """The same, with tokens and heads by the shares of all ranks, of which this rank's sequence group takes its own."""
        if shares is None:
            return self
        size = self.sequence.world_size
        first = 0 if self.cfg is None else self.cfg.rank * size
        return replace(self, sequence=replace(self.sequence, shares=shares.part(first, first + size)))


@dataclass(frozen=True)
class WeightGroup:
    """What gathers shared weights: the ranks of a forward by a transport of its own, which counts by itself."""

    transport: Transport
    #: where gathers run while a block computes; None where the transport needs the processor that computes
    lane: Lane | None
    #: by model: which block came behind which in its last forward. Here, as all ranks make and forget a group together
    following: dict[Any, dict[int, int]] = field(default_factory=dict)


class ParallelGroupsCache:
    """Makes :class:`ParallelGroups` of the first ranks of the world, and keeps them by their degrees.

    All its transports count into one :class:`TransportStats`, ``stats``.
    """

    def __init__(
        self,
        make_transport: MakeTransport,
        timeout: timedelta,
        make_lane: Callable[[], Lane | None] = lambda: None,
        make_for_weights: MakeTransport | None = None,
    ) -> None:
        """Makes nothing yet.

        Args:
            timeout: that of the collectives of all groups.
            make_lane: makes where exchanges can run beside attention, if they can. Not collective.
            make_for_weights: makes what gathers weights; None: as for all else.
        """
        self._make, self._make_lane = make_transport, make_lane
        self._make_for_weights = make_for_weights or make_transport
        self._lane: Lane | None = None
        self._meshes = Meshes(timeout)
        self._built: dict[Degrees, ParallelGroups | None] = {}
        self._transports: dict[tuple[int, ...], Transport] = {}
        self._weights: dict[int, WeightGroup] = {}
        self.stats = TransportStats()

    def build(self, degrees: Degrees) -> ParallelGroups | None:
        """The groups of this rank among the first ``degrees.ranks``; None on the others, which stay idle.

        Collective over the world when the degrees are new: ranks that stay idle must call it too.

        Raises:
            ValueError: the world has fewer ranks than the degrees need.
        """
        if degrees not in self._built:
            mesh = self._meshes.build(degrees.cfg, degrees.ring, degrees.ulysses)
            self._built[degrees] = None if mesh is None else self._groups_of(degrees, mesh)
        return self._built[degrees]

    def _groups_of(self, degrees: Degrees, mesh: Mesh) -> ParallelGroups:
        all_ranks = self._transport(mesh.sp)
        ulysses = self._transport(mesh.ulysses)
        ring = Ring(mesh.ring.group, self.stats) if degrees.ring > 1 else None
        cfg = self._transport(mesh.cfg) if degrees.cfg > 1 else None
        if self._lane is None:
            self._lane = self._make_lane()
        return ParallelGroups(degrees, SequenceGroup(all_ranks, ulysses, ring, self._lane), cfg, mesh.sp.group)

    def for_weights(self, ranks: int) -> WeightGroup | None:
        """What gathers weights that lie over the first ``ranks`` ranks; None on the others.

        Collective over the world when it is new. Its transport is no other's: a gather goes beside the exchanges of a block.
        """
        axis = self._meshes.further(ranks)
        if axis is None:
            return None
        if ranks not in self._weights:
            transport = self._make_for_weights(axis.group)
            transport.hold_little()
            self._weights[ranks] = WeightGroup(transport, self._make_lane() if transport.beside else None)
        return self._weights[ranks]

    def _transport(self, axis: MeshAxis) -> Transport:
        if axis.ranks not in self._transports:
            transport = self._make(axis.group)
            transport.stats = self.stats
            self._transports[axis.ranks] = transport
        return self._transports[axis.ranks]

    def _all(self) -> list[Transport]:
        return [*self._transports.values(), *(weights.transport for weights in self._weights.values())]

    def renew(self) -> None:
        """Forget everything after a failure, as ranks may have left it at different places. Collective over the world.

        Ranks that missed groups which others made are brought into step.
        """
        self.close()
        self._meshes.catch_up(max(count for (count,) in all_gather_ints(None, [self._meshes.asked])))

    def trim(self) -> None:
        """Give back device memory that the next exchanges can take again. Collective over each transport's ranks."""
        for transport in self._all():
            transport.trim()

    def close(self) -> None:
        """Give back all transports and groups. :class:`ParallelGroups` that were built before are dead afterwards."""
        if self._lane is not None:
            self._lane.close()
        self._lane = None
        for transport in self._all():
            transport.close()
        for weights in self._weights.values():
            if weights.lane is not None:
                weights.lane.close()
        self._weights.clear()
        self._transports.clear()
        self._built.clear()
        self._meshes.close()
