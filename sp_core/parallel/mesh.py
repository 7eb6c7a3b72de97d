"""The device mesh cfg x ring x ulysses: which ranks are in a group along which axis.

A rank's place is ``rank = (cfg * ring_size + ring) * ulysses_size + ulysses``. The ranks of a
Ulysses group are neighbours, as an all-to-all needs the fastest links; a ring steps over them, and
the parts of the batch (cfg) are farthest apart. ring and ulysses together are the axis of a
sequence group, here ``sp``. LongCat-Video calls the two axes ``dp`` and ``cp``.

Several meshes live side by side. Process groups are kept by their members, so going back to
earlier degrees makes no new communicator. torch's DeviceMesh is not used: each of its meshes
makes groups of its own that it cannot destroy, its axis over all ranks is the default group,
which cannot be made anew after a failure, and it joins ring and ulysses to one axis only by
a private method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class MeshAxis:
    """The group that one rank is in along one axis."""

    group: dist.ProcessGroup
    #: global ranks of the members, in axis order
    ranks: tuple[int, ...]
    #: this rank's place on the axis
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh:
    """One rank's groups along the axes cfg, ring and ulysses, and along ``sp``: ring and ulysses as one axis, ring-major."""

    cfg: MeshAxis
    ring: MeshAxis
    ulysses: MeshAxis
    sp: MeshAxis

    @property
    def cp(self) -> MeshAxis:
        """The sequence axis under its LongCat-Video name."""
        return self.sp

    @property
    def dp(self) -> MeshAxis:
        """The axis of the batch's parts under its LongCat-Video name."""
        return self.cfg


def axis_members(shape: tuple[int, int, int], rank: int) -> dict[str, tuple[int, ...]]:
    """The ranks that share a group with ``rank``, by axis. ``shape`` is (cfg, ring, ulysses).

    Raises:
        ValueError: ``rank`` is outside the mesh.
    """
    cfg_size, ring_size, ulysses_size = shape
    sequence = ring_size * ulysses_size
    if not 0 <= rank < cfg_size * sequence:
        raise ValueError(f"rank {rank} is outside a mesh of CFG {cfg_size} x ring {ring_size} x Ulysses {ulysses_size}")
    cfg, place = divmod(rank, sequence)
    ring, ulysses = divmod(place, ulysses_size)
    row = cfg * sequence
    return {
        "cfg": tuple(range(place, cfg_size * sequence, sequence)),
        "ring": tuple(range(row + ulysses, row + sequence, ulysses_size)),
        "ulysses": tuple(range(row + ring * ulysses_size, row + (ring + 1) * ulysses_size)),
        "sp": tuple(range(row, row + sequence)),
    }


def axis_groups(shape: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """The members of every group in a mesh, each group once.

    They come one axis after the other, as the groups of one axis do not overlap and can be made at the same time.
    """
    everybody = [axis_members(shape, rank) for rank in range(math.prod(shape))]
    return list(dict.fromkeys(members[axis] for axis in ("ulysses", "ring", "sp", "cfg") for members in everybody))


class Meshes:
    """Makes meshes over the first ranks of the world, and keeps their process groups.

    All ranks of the world build the same meshes in the same order, also those that they are not
    in. torch names a group by how many the process has asked for before, so ranks that count
    differently wait for each other forever.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        """``timeout`` is that of the groups' collectives; torch's default when not given."""
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], Any] = {}
        self._further: dict[tuple[int, ...], Any] = {}
        #: how many groups this rank has asked torch for, closed ones too
        self.asked = 0

    def build(self, cfg: int = 1, ring: int = 1, ulysses: int = 1) -> Mesh | None:
        """The mesh of these degrees; None on a rank outside it. Collective over the world when it is new.

        Raises:
            ValueError: a degree is less than one, or the world has fewer ranks than they need.
        """
        shape, rank = (cfg, ring, ulysses), dist.get_rank()
        if min(shape) < 1 or math.prod(shape) > dist.get_world_size():
            raise ValueError(f"CFG {cfg} x ring {ring} x Ulysses {ulysses} does not fit a world of {dist.get_world_size()} ranks")
        for ranks in axis_groups(shape):
            if ranks not in self._groups:
                self.asked += 1
                self._groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout)
        if rank >= math.prod(shape):
            return None
        members = axis_members(shape, rank)
        return Mesh(**{axis: MeshAxis(self._groups[ranks], ranks, ranks.index(rank)) for axis, ranks in members.items()})

    def further(self, count: int) -> MeshAxis | None:
        """Another group of the first ``count`` ranks, for what goes beside the exchanges of a mesh; None on a rank outside it.

        Collective over the world when it is new.
        """
        ranks, rank = tuple(range(count)), dist.get_rank()
        if ranks not in self._further:
            self.asked += 1
            self._further[ranks] = dist.new_group(list(ranks), timeout=self._timeout)
        return None if rank >= count else MeshAxis(self._further[ranks], ranks, rank)

    def catch_up(self, asked: int) -> None:
        """Ask torch for groups of other ranks until this rank has asked ``asked`` times, as ranks have that built a mesh without it."""
        while self.asked < asked:
            self.asked += 1
            dist.new_group([(dist.get_rank() + 1) % dist.get_world_size()], timeout=self._timeout)

    def close(self) -> None:
        """Destroy the groups that were made. Meshes built before are dead afterwards."""
        for groups in (self._groups, self._further):
            while groups:
                _, group = groups.popitem()
                dist.destroy_process_group(group)  # does nothing on a rank outside the group
