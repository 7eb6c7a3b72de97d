"""The device mesh dp x ring x ulysses: which rank talks to which, as an object.

Rank g of the parent group sits at ``g = (dp * ring_size + ring) * ulysses_size + ulysses``:
Ulysses groups are neighbours (all-to-all wants the fastest links), rings step over them, and
the dp halves (CFG, batch) are farthest apart. ring x ulysses together are one sequence
group, here ``sp``; LongCat-Video calls it ``cp``.

Several meshes live side by side; process groups are kept by their members, so going back to
an earlier layout makes no new communicator. torch's DeviceMesh is not used: it makes its
groups with all ranks of the default group taking part, whereas a mesh here may lie over
some of them, and it joins ring and ulysses to one axis only by a private method.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

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
    """Who shares each axis with ``rank``, as ranks of the parent group. ``shape`` = (dp, ring, ulysses).

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


class Meshes:
    """Makes meshes over one parent group and keeps their process groups.

    All ranks of the parent must build the same meshes in the same order; ranks outside it
    take no part.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        self._parent = dist.get_process_group_ranks(group)
        self._backend = dist.get_backend(group)
        self._timeout = timeout
        self._rank = dist.get_rank(group)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @property
    def place(self) -> tuple[int, int]:
        """(rank, size) in the parent group."""
        return self._rank, len(self._parent)

    def build(self, dp: int = 1, ring: int = 1, ulysses: int = 1) -> Mesh:
        """The mesh of these degrees. Collective over the parent group when it is new.

        Raises:
            ValueError: the degrees do not multiply to the size of the parent group.
        """
        world_size = len(self._parent)
        if min(dp, ring, ulysses) < 1 or dp * ring * ulysses != world_size:
            raise ValueError(f"dp {dp} x ring {ring} x Ulysses {ulysses} is not the world of {world_size} ranks")
        members = axis_members((dp, ring, ulysses), self._rank)
        # the same order on every rank: groups that overlap are made one axis after the other
        return Mesh(**{name: self._axis(members[name]) for name in ("ulysses", "ring", "sp", "dp")})

    def close(self) -> None:
        """Destroy the groups that were made. Meshes built before are dead afterwards."""
        while self._groups:
            _, group = self._groups.popitem()
            dist.destroy_process_group(group)

    def _axis(self, members: tuple[int, ...]) -> MeshAxis:
        ranks = tuple(self._parent[member] for member in members)
        if ranks not in self._groups:
            # only the members meet: ranks outside the parent group need not know
            group = dist.new_group(list(ranks), timeout=self._timeout, backend=self._backend, use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)  # this rank is a member
            self._groups[ranks] = group
        return MeshAxis(self._groups[ranks], ranks, members.index(self._rank))


def init_context_parallel(
    context_parallel_size: int,
    global_rank: int | None = None,
    world_size: int | None = None,
    *,
    meshes: Meshes | None = None,
) -> Mesh:
    """The 2-D mesh (dp, cp): rank g has dp = g div cp and cp = g mod cp.

    The reference keeps one topology in module globals; here it is the returned object, and
    every function that needs it takes it.

    Args:
        context_parallel_size: ranks that share one sequence.
        global_rank, world_size: checked against the process group when given.
        meshes: where to build it; over the default process group when not given.

    Raises:
        ValueError: ``world_size % context_parallel_size != 0``, or a given rank or size is not
            that of the process group.

    Source: LongCat-Video, context-parallel utilities (which raises RuntimeError).
    """
    meshes = Meshes() if meshes is None else meshes
    actual_rank, actual_size = meshes.place
    for name, given, actual in (("global_rank", global_rank, actual_rank), ("world_size", world_size, actual_size)):
        if given is not None and given != actual:
            raise ValueError(f"{name} {given} was given, but the process group says {actual}")
    if context_parallel_size < 1 or actual_size % context_parallel_size:
        raise ValueError(f"a world of {actual_size} ranks cannot be divided by context_parallel_size {context_parallel_size}")
    return meshes.build(dp=actual_size // context_parallel_size, ulysses=context_parallel_size)
