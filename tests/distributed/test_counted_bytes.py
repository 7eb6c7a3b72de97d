"""Bytes counted in the transports of real forwards against the formula. ``-s`` prints each rank's bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from distributed.ranks import RankPools

from sp_core.attention.partial import exchanged_cross_attention, partial_cross_attention
from sp_core.attention.ring import usp_attention
from sp_core.bench import cross
from sp_core.comm import CollectiveTransport
from sp_core.comm.ring_shift import Ring
from sp_core.layout import FlatLayout, SequenceLayout, Shares, TileLayout, Weights
from sp_core.parallel.mesh import Meshes
from sp_core.planner.degrees import Degrees
from sp_core.planner.traffic import CrossAttention, ForwardShape, cross_bytes, forward_bytes

LAYOUTS: dict[str, Callable[[int], SequenceLayout]] = {
    "flat": lambda world_size: FlatLayout(127, world_size),
    "tiles": lambda world_size: TileLayout.over((3, 6, 7), world_size),
}
DEGREES = [Degrees(1, ring, size // ring) for size in (2, 4, 6) for ring in range(1, size + 1) if size % ring == 0]
CROSSES = {
    "self-attention only": None,
    "V2A partial": CrossAttention(5, 7, 4),
    "V2A exchanged": CrossAttention(5, 7, 4, partial=False),
}


@functools.cache
def meshes() -> Meshes:
    """Those of this rank: their groups stay from case to case."""
    return Meshes()


def forward(shape: ForwardShape, layout: SequenceLayout, ring_size: int, rank: int, weights: Weights | None = None) -> int:
    """Blocks of self-attention and cross-attention, then the output: what a model sends. Returns the bytes counted."""
    mesh = meshes().build(ring=ring_size, ulysses=layout.world_size // ring_size)
    ulysses, everyone = CollectiveTransport(mesh.ulysses.group), CollectiveTransport(mesh.sp.group)
    everyone.stats = ulysses.stats
    ring = Ring(mesh.ring.group, ulysses.stats)
    t = layout.counts[rank]
    hidden = torch.randn(shape.batch, t, shape.heads, shape.head_dim, dtype=torch.bfloat16)
    for _ in range(shape.blocks):
        usp_attention(hidden, hidden, hidden, ulysses, ring, layout.counts, weights=weights)
        if shape.cross is not None:
            query = torch.zeros(shape.batch, shape.cross.queries, shape.cross.heads, shape.cross.head_dim, dtype=torch.bfloat16)
            keys = query.new_ones(shape.batch, t, shape.cross.heads, shape.cross.head_dim)
            form = partial_cross_attention if shape.cross.partial else exchanged_cross_attention
            form(query, keys, keys, everyone, layout.counts)
    output = everyone.all_gather_tokens(hidden.new_zeros(shape.batch, t, shape.out_channels), layout.counts)
    assert layout.restore(output).size(1) == layout.tokens
    return ulysses.stats.bytes_sent


def counted_and_predicted(rank: int, world_size: int, layout_name: str, ring_size: int, cross_name: str) -> tuple[int, int]:
    layout = LAYOUTS[layout_name](world_size)
    shape = ForwardShape(blocks=2, heads=7, head_dim=8, out_channels=6, batch=2, cross=CROSSES[cross_name])
    return forward(shape, layout, ring_size, rank), forward_bytes(shape, layout, rank, ring_size)


@pytest.mark.parametrize("cross", CROSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("degrees", DEGREES, ids=Degrees.describe)
def test_counted_bytes_equal_the_formula(ranks: RankPools, degrees: Degrees, layout: str, cross: str) -> None:
    by_rank = ranks.call(degrees.ranks, counted_and_predicted, layout, degrees.ring, cross)
    counted, predicted = ([pair[index] for pair in by_rank] for index in (0, 1))
    print(f"\n{degrees.describe()}, {layout}, {cross}: {' '.join(f'{count:7,}' for count in counted)}")
    assert counted == predicted
    assert min(counted) > 0


def counted_and_predicted_of_shares(rank: int, world_size: int, layout_name: str, ring: int, heads: int, shares: Shares) -> tuple[int, int]:
    layout, weights = LAYOUTS[layout_name](world_size).weighted(shares.tokens), shares.of_columns(ring)
    shape = ForwardShape(blocks=2, heads=heads, head_dim=8, out_channels=6, batch=2, cross=CROSSES["V2A partial"])
    return forward(shape, layout, ring, rank, weights), forward_bytes(shape, layout, rank, ring, weights)


@pytest.mark.parametrize("weights", [(3, 1), (2, 1, 1), (5, 3)], ids=str)
@pytest.mark.parametrize("heads", [12, 24, 40])
def test_counted_bytes_of_shares_equal_the_formula(ranks: RankPools, heads: int, weights: Weights) -> None:
    for layout in LAYOUTS:
        for ring in (1, len(weights)):
            by_rank = ranks.call(len(weights), counted_and_predicted_of_shares, layout, ring, heads, Shares.of(weights))
            counted, predicted = ([pair[index] for pair in by_rank] for index in (0, 1))
            print(f"\n{weights}, ring {ring}, {layout}, {heads} heads: {' '.join(f'{count:7,}' for count in counted)}")
            assert counted == predicted
            assert min(counted) > 0


def test_bench_of_both_cross_attention_forms() -> None:
    [row] = cross.measure(2, lengths=(65,))
    counts = FlatLayout(65, 2).counts
    for partial, counted in ((True, row.partial_bytes), (False, row.exchanged_bytes)):
        shape = CrossAttention(cross.QUERIES, cross.HEADS, cross.HEAD_DIM, partial)
        assert counted == cross_bytes(shape, counts, 0, 2, 1)
    assert row.difference < 0.02  # bf16
    assert "65" in cross.format_rows([row])[1]
