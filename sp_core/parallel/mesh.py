"""The device mesh dp x ring x ulysses: which rank talks to which, as an object.

Rank g sits at ``g = (dp * ring_size + ring) * ulysses_size + ulysses``:
Ulysses groups are neighbours (all-to-all wants the fastest links), rings step over them, and
the dp halves (CFG, batch) are farthest apart. ring x ulysses together are one sequence
group, here ``sp``; LongCat-Video calls it ``cp``.

Several meshes live side by side; process groups are kept by their members, so going back to
an earlier layout makes no new communicator. torch's DeviceMesh is not used: each of its meshes
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
    """One axis as one rank sees it."""

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
    """dp x ring x ulysses, and ``sp`` = ring x ulysses in one axis (ring-major)."""

    dp: MeshAxis
    ring: MeshAxis
    ulysses: MeshAxis
    sp: MeshAxis

    @property
    def cp(self) -> MeshAxis:
        """The sequence axis under its LongCat-Video name."""
        return self.sp


def axis_members(shape: tuple[int, int, int], rank: int) -> dict[str, tuple[int, ...]]:
    """Who shares each axis with ``rank``. ``shape`` = (dp, ring, ulysses).

    Raises:
        ValueError: ``rank`` is outside the mesh.
    """
    dp_size, ring_size, ulysses_size = shape
    sequence = ring_size * ulysses_size
    if not 0 <= rank < dp_size * sequence:
        raise ValueError(f"rank {rank} is outside a mesh of dp {dp_size} x ring {ring_size} x Ulysses {ulysses_size}")
    dp, place = divmod(rank, sequence)
    ring, ulysses = divmod(place, ulysses_size)
    row = dp * sequence
    return {
        "dp": tuple(range(place, dp_size * sequence, sequence)),
        "ring": tuple(range(row + ulysses, row + sequence, ulysses_size)),
        "ulysses": tuple(range(row + ring * ulysses_size, row + (ring + 1) * ulysses_size)),
        "sp": tuple(range(row, row + sequence)),
    }


def axis_groups(shape: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """The members of every group in a mesh, each group once: one axis after the other, as groups of one axis do not overlap."""
    everybody = [axis_members(shape, rank) for rank in range(math.prod(shape))]
    return list(dict.fromkeys(members[axis] for axis in ("ulysses", "ring", "sp", "dp") for members in everybody))


class Meshes:
    """Makes meshes over the first ranks of the world and keeps their process groups.

    All ranks of the world build the same meshes in the same order, also those that they are not
    in: torch names a group by how many the process has asked for before, and ranks that count
    differently wait for each other forever.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        """``timeout``: of the groups' collectives; torch's default when not given."""
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], Any] = {}
        #: how many groups this rank has asked torch for, closed ones too
        self.asked = 0

    def build(self, dp: int = 1, ring: int = 1, ulysses: int = 1) -> Mesh | None:
        """The mesh of these degrees; None on a rank outside it. Collective over the world when it is new.

        Raises:
            ValueError: a degree is less than one, or the world has fewer ranks than they need.
        """
        shape, rank = (dp, ring, ulysses), dist.get_rank()
        if min(shape) < 1 or math.prod(shape) > dist.get_world_size():
            raise ValueError(f"dp {dp} x ring {ring} x Ulysses {ulysses} does not fit a world of {dist.get_world_size()} ranks")
        for ranks in axis_groups(shape):
            if ranks not in self._groups:
                self.asked += 1
                self._groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout)
        if rank >= math.prod(shape):
            return None
        members = axis_members(shape, rank)
        return Mesh(**{axis: MeshAxis(self._groups[ranks], ranks, ranks.index(rank)) for axis, ranks in members.items()})

    def catch_up(self, asked: int) -> None:
        """Ask torch for groups of others until this rank has asked ``asked`` times, as those have that made a layout without it."""
        while self.asked < asked:
            self.asked += 1
            dist.new_group([(dist.get_rank() + 1) % dist.get_world_size()], timeout=self._timeout)

    def close(self) -> None:
        """Destroy the groups that were made. Meshes built before are dead afterwards."""
        while self._groups:
            _, group = self._groups.popitem()
            dist.destroy_process_group(group)  # does nothing on a rank outside the group
