"""Who shares which axis: the reference's rank tables, and the three-axis order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sp_core.parallel.mesh import axis_groups, axis_members

VECTORS = json.loads((Path(__file__).parents[1] / "fixtures" / "longcat_vectors.json").read_text())


@pytest.mark.parametrize("name", VECTORS["mesh"])
def test_two_axes_are_the_references(name: str) -> None:
    world_size, cp = (int(part.lstrip("worldcp")) for part in name.split("_"))
    for vector in VECTORS["mesh"][name]:
        members = axis_members((world_size // cp, 1, cp), vector["rank"])
        assert members["sp"] == members["ulysses"] == tuple(vector["cp_ranks"])
        assert members["cfg"] == tuple(vector["dp_ranks"])
        assert members["sp"].index(vector["rank"]) == vector["cp_rank"]
        assert members["cfg"].index(vector["rank"]) == vector["dp_rank"]


@pytest.mark.parametrize(
    ("shape", "rank", "cfg", "ring", "ulysses", "sp"),
    [
        ((1, 1, 1), 0, (0,), (0,), (0,), (0,)),
        ((2, 2, 2), 5, (1, 5), (5, 7), (4, 5), (4, 5, 6, 7)),
        ((2, 3, 1), 4, (1, 4), (3, 4, 5), (4,), (3, 4, 5)),
        ((1, 2, 4), 6, (6,), (2, 6), (4, 5, 6, 7), tuple(range(8))),
    ],
)
def test_three_axes(shape: tuple[int, int, int], rank: int, cfg: tuple, ring: tuple, ulysses: tuple, sp: tuple) -> None:
    assert axis_members(shape, rank) == {"cfg": cfg, "ring": ring, "ulysses": ulysses, "sp": sp}


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1, 1, 1), "0"),
        ((1, 1, 3), "012 0 1 2"),
        ((1, 3, 1), "0 1 2 012"),
        ((2, 1, 1), "0 1 01"),
        ((2, 1, 2), "01 23 0 1 2 3 02 13"),
        ((1, 2, 2), "01 23 02 13 0123 0 1 2 3"),
        ((2, 2, 2), "01 23 45 67 02 13 46 57 0123 4567 04 15 26 37"),
    ],
)
def test_every_group_of_a_mesh_once(shape: tuple[int, int, int], groups: str) -> None:
    assert axis_groups(shape) == [tuple(map(int, group)) for group in groups.split()]


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4 is outside a mesh of CFG 2 x ring 1 x Ulysses 2"):
        axis_members((2, 1, 2), 4)
