"""Bytes counted in the transports of real forwards against the formula. ``-s`` prints the table."""

from __future__ import annotations

import pytest
import torch
from distributed.ranks import run_ranks

from sp_core.attention.partial import exchanged_cross_attention, partial_cross_attention
from sp_core.attention.ring import parallel_attention
from sp_core.bench import cross
from sp_core.comm import CollectiveTransport
from sp_core.comm.ring import Ring
from sp_core.layout import FlatLayout, SequenceLayout, TileLayout, choose_split
from sp_core.parallel.mesh import Meshes
from sp_core.planner.traffic import CrossAttention, ForwardShape, cross_bytes, forward_bytes

GRID = (3, 6, 7)
CROSSES = (None, CrossAttention(5, 7, 4), CrossAttention(5, 7, 4, partial=False))


def forward(shape: ForwardShape, layout: SequenceLayout, meshes: Meshes, ring_size: int, rank: int) -> int:
    """Blocks of self-attention and cross-attention, then the output: what a model sends. Returns the bytes counted."""
    mesh = meshes.build(ring=ring_size, ulysses=layout.world_size // ring_size)
    ulysses, everyone = CollectiveTransport(mesh.ulysses.group), CollectiveTransport(mesh.sp.group)
    everyone.stats = ulysses.stats
    ring = Ring(mesh.ring.group, ulysses.stats)
    t = layout.counts[rank]
    hidden = torch.randn(shape.batch, t, shape.heads, shape.head_dim, dtype=torch.bfloat16)
    for _ in range(shape.blocks):
        parallel_attention(hidden, hidden, hidden, ulysses, ring, layout.counts)
        if shape.cross is not None:
            query = torch.zeros(shape.batch, shape.cross.queries, shape.cross.heads, shape.cross.head_dim, dtype=torch.bfloat16)
            keys = query.new_ones(shape.batch, t, shape.cross.heads, shape.cross.head_dim)
            form = partial_cross_attention if shape.cross.partial else exchanged_cross_attention
            form(query, keys, keys, everyone, layout.counts)
    output = everyone.all_gather_tokens(hidden.new_zeros(shape.batch, t, shape.out_channels), layout.counts)
    assert layout.restore(output).size(1) == layout.tokens
    return ulysses.stats.bytes_sent


def every_layout(rank: int, world_size: int) -> list[tuple[str, int, int]]:
    meshes, rows = Meshes(), []
    layouts = [FlatLayout(127, world_size), TileLayout(GRID, choose_split(*GRID[1:], world_size))]
    for layout in layouts:
        for ring_size in (size for size in range(1, world_size + 1) if world_size % size == 0):
            for pair in CROSSES:
                shape = ForwardShape(blocks=2, heads=7, head_dim=8, out_channels=6, batch=2, cross=pair)
                form = "" if pair is None else ", V2A partial" if pair.partial else ", V2A exchanged"
                name = f"{layout.describe()}, ring {ring_size} x Ulysses {world_size // ring_size}{form}"
                rows.append((name, forward(shape, layout, meshes, ring_size, rank), forward_bytes(shape, layout, rank, ring_size)))
    meshes.close()
    return rows


@pytest.mark.parametrize("world_size", [2, 4, 6])
def test_counted_bytes_equal_the_formula(world_size: int) -> None:
    by_rank = run_ranks(world_size, every_layout)
    print(f"\n{world_size} ranks: bytes sent by each rank in one forward, counted = formula")
    for rows in zip(*by_rank, strict=True):
        name = rows[0][0]
        counted, predicted = [row[1] for row in rows], [row[2] for row in rows]
        print(f"  {name:44} {' '.join(f'{count:7,}' for count in counted)}")
        assert counted == predicted, name
        assert min(counted) > 0


def test_bench_of_both_cross_attention_forms() -> None:
    [row] = cross.measure(2, lengths=(65,))
    counts = FlatLayout(65, 2).counts
    for partial, counted in ((True, row.partial_bytes), (False, row.exchanged_bytes)):
        shape = CrossAttention(cross.QUERIES, cross.HEADS, cross.HEAD_DIM, partial)
        assert counted == cross_bytes(shape, counts, 0, 2, 1)
    assert row.difference < 0.02  # bf16
    assert "65" in cross.format_rows([row])[1]
