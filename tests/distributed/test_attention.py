"""Ulysses, ring, their product and partial attention on spawned ranks against one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from campaign import parameters
from distributed.ranks import RankPools, run_ranks
from torch import Tensor

from sp_core.attention.local import attention_with_lse
from sp_core.attention.masks import as_BHqk, to_additive, to_rank_order
from sp_core.attention.partial import exchanged_cross_attention, partial_cross_attention
from sp_core.attention.ring import ring_attention, usp_attention
from sp_core.attention.ulysses import ulysses_attention
from sp_core.comm import CollectiveTransport
from sp_core.comm.ring_shift import Ring
from sp_core.layout import FlatLayout, SequenceLayout, Shares, TileLayout, shard_sizes
from sp_core.parallel.mesh import Meshes
from sp_core.planner.degrees import Degrees

B, D = 2, 8
MASKS = [None, "bool", "key-only", "per head", "strengths", "finite minimum", "-inf"]


def make_mask(kind: str, T: int, H: int) -> Tensor:
    """Row 3 has no key, where the mask has rows."""
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(B, T, T, generator=generator) > 0.4
    keep[:, 3] = False
    if kind == "bool":
        return keep
    if kind == "key-only":
        return keep[:1, 2:3]
    if kind == "per head":
        return torch.rand(B, H, T, T, generator=generator) > 0.5
    if kind == "strengths":
        return torch.rand(B, T, T, generator=generator).log()
    if kind == "finite minimum":
        return torch.zeros(B, T, T).masked_fill(~keep, torch.finfo(torch.float32).min)
    return to_additive(keep, torch.float32)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = None if mask is None else as_BHqk(mask)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)


def check(name: str, out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape, name
    assert not out.isnan().any(), name
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6, msg=lambda text: f"{name}: {text}")


@dataclass(frozen=True)
class Case:
    world_size: int
    ring: int
    layout: str
    heads: int
    mask: str | None
    weights: tuple[int, ...] = ()

    def __str__(self) -> str:
        degrees = Degrees(1, self.ring, self.world_size // self.ring).describe()
        shares = f", {Shares.of(self.weights).describe()}" if self.weights else ""
        return f"{degrees}, {self.layout}, {self.heads} heads, {self.mask or 'no'} mask{shares}"


LAYOUTS: dict[str, Callable[[int], SequenceLayout]] = {
    "flat": lambda world_size: FlatLayout(29, world_size),
    "too few tokens": lambda world_size: FlatLayout(world_size - 1, world_size),
    "tiles": lambda world_size: TileLayout((2, 5, 3), (world_size, 1), suffix=1),
}


def cases(*world_sizes: int) -> list[Case]:
    return [
        Case(world_size, ring, layout, heads, mask)
        for world_size in world_sizes
        for ring in range(1, world_size + 1)
        for layout, heads, mask in itertools.product(LAYOUTS, (5, 1), MASKS)
        # every mask with rows has something in row 3
        if world_size % ring == 0 and (mask is None or LAYOUTS[layout](world_size).tokens >= 4)
    ]


#: ranks that are not equally fast; with a ring, rows that differ too
WEIGHTED = [
    Case(len(weights), ring, layout, heads, mask, weights)
    for weights, rings in (((3, 1), (1, 2)), ((2, 1, 1), (1, 3)), ((5, 3, 1, 1), (1, 2, 4)))
    for ring, layout, heads, mask in itertools.product(rings, ("flat", "tiles"), (12, 3), (None, "per head"))
]


@functools.cache
def meshes() -> Meshes:
    """Those of this rank: their groups stay from case to case."""
    return Meshes()


def check_case(rank: int, world_size: int, case: Case) -> None:
    layout, heads_by = LAYOUTS[case.layout](world_size), None
    if case.weights:
        layout, heads_by = layout.weighted(case.weights), Shares.of(case.weights).of_columns(case.ring)
    mesh = meshes().build(ring=case.ring, ulysses=world_size // case.ring)
    transport = CollectiveTransport(mesh.ulysses.group)
    ring = Ring(mesh.ring.group, transport.stats)
    generator = torch.Generator().manual_seed(layout.tokens + case.heads)
    q, k, v = (torch.randn(B, layout.tokens, case.heads, D, generator=generator) for _ in range(3))
    mask = None if case.mask is None else make_mask(case.mask, layout.tokens, case.heads)
    expected = layout.shard(sdpa(q, k, v, mask), rank)
    mask = None if mask is None else to_rank_order(as_BHqk(mask), layout)
    shards = [layout.shard(x, rank) for x in (q, k, v)]
    out = usp_attention(*shards, transport, ring, layout.counts, mask=mask, weights=heads_by)
    exchanges = transport.stats.exchanges
    if case.ring == 1:
        check("with another attention", ulysses_attention(*shards, transport, layout.counts, sdpa, mask=mask, weights=heads_by), expected)
    check(f"rank {rank}", out, expected)
    owned = shard_sizes(case.heads, mesh.ulysses.size, heads_by)[mesh.ulysses.rank]
    hops = case.ring - 1 if owned else 0  # a rank without heads passes nothing on
    assert exchanges == (2 if mesh.ulysses.size > 1 else 0) + hops


@pytest.mark.parametrize("case", parameters(plain=cases(1, 2, 3, 4) + WEIGHTED, campaign=cases(6)), ids=str)
def test_equals_one_process(ranks: RankPools, case: Case) -> None:
    ranks.call(case.world_size, check_case, case)


def check_ring(rank: int, world_size: int, counts: list[int]) -> None:
    calls = []

    def other(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, Tensor]:
        calls.append(k.size(1))
        return attention_with_lse(q.double(), k.double(), v.double(), mask, scale)

    T, start = sum(counts), sum(counts[:rank])
    q, k, v = (torch.randn(B, T, 3, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mine = [x[:, start : start + counts[rank]] for x in (q, k, v)]
    out, lse = ring_attention(*mine, Ring(), counts, attend=other, scale=0.2)
    expected, expected_lse = attention_with_lse(q, k, v, scale=0.2)
    check(str(counts), out, expected[:, start : start + counts[rank]])
    torch.testing.assert_close(lse.float(), expected_lse[:, :, start : start + counts[rank]])
    assert calls == [counts[(rank - hop) % world_size] for hop in range(world_size)]


@pytest.mark.parametrize("counts", [[7, 1, 0], [0, 0, 5], [3, 3, 3]], ids=str)
def test_a_ring_takes_blocks_of_any_length_and_any_attention_with_lse(ranks: RankPools, counts: list[int]) -> None:
    ranks.call(3, check_ring, counts)


def check_half_types(rank: int, world_size: int) -> None:
    q, k, v = (torch.randn(1, 9, 2, D, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    out, _ = ring_attention(*(x[:, rank * 3 : rank * 3 + 3] for x in (q, k, v)), Ring(), [3, 3, 3])
    torch.testing.assert_close(out, sdpa(q, k, v)[:, rank * 3 : rank * 3 + 3], atol=0.02, rtol=0.02)


def test_half_types_travel_a_ring_as_they_are(ranks: RankPools) -> None:
    ranks.call(3, check_half_types)


def check_refusal(rank: int, world_size: int, counts: list[int], wrong_on: tuple[int, ...], message: str) -> None:
    ring, shard = Ring(), torch.zeros(1, 3, 2, D)
    if rank in wrong_on:  # on the others the counts are right, and they would wait
        with pytest.raises(ValueError, match=message):
            ring_attention(shard, shard, shard, ring, counts)


@pytest.mark.parametrize(("counts", "wrong_on", "message"), [([3, 3], (0, 1, 2), "2 token counts"), ([4, 3, 3], (0,), "owns")])
def test_a_ring_refuses_counts_that_are_wrong(ranks: RankPools, counts: list[int], wrong_on: tuple[int, ...], message: str) -> None:
    ranks.call(3, check_refusal, counts, wrong_on, message)


def live_bytes() -> int:
    import gc

    gc.collect()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects() if torch.is_tensor(x)}
    return sum(storages.values())


def fifty_forwards(rank: int, world_size: int) -> tuple[int, int]:
    import resource

    ring = Ring()
    shards = [torch.randn(1, 512, 8, 64) for _ in range(3)]

    def forward() -> None:
        ring_attention(*shards, ring, [512] * world_size)

    for _ in range(5):
        forward()
    before, peak = live_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        forward()
    return live_bytes() - before, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024


def test_ring_memory_does_not_grow_over_fifty_forwards() -> None:
    for tensors_grown, process_grown in run_ranks(2, fifty_forwards):
        assert tensors_grown == 0
        # 50 forwards that each kept one received block would hold 100 MB
        assert process_grown < 20e6


FORMS = {form.__name__: form for form in (partial_cross_attention, exchanged_cross_attention)}


def cross_attention(rank: int, world_size: int, form: str, heads: int, mask_kind: str | None) -> bytes:
    """The output, equal to that of one process, as bytes."""
    counts = FlatLayout(31, world_size).counts
    start, A = sum(counts[:rank]), 6
    q, k, v = (torch.randn(B, T, heads, D, generator=torch.Generator().manual_seed(i)) for i, T in enumerate((A, 31, 31)))
    mask = None if mask_kind is None else make_mask(mask_kind, 31, heads)
    if mask is not None and mask.size(-2) != 1:
        mask = mask[..., :A, :]
    mine = [x[:, start : start + counts[rank]] for x in (k, v)]
    out = FORMS[form](q, *mine, CollectiveTransport(), counts, mask=mask)
    check(f"rank {rank}", out, sdpa(q, k, v, mask))
    return out.contiguous().numpy().tobytes()


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_cross_attention_is_exact_and_equal_on_all_ranks(
    ranks: RankPools, world_size: int, form: str, heads: int, mask_kind: str | None
) -> None:
    first, *others = ranks.call(world_size, cross_attention, form, heads, mask_kind)
    assert all(other == first for other in others)
