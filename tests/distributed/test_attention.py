"""Ulysses, ring, their product and partial attention on spawned ranks against one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from campaign import parameters
from distributed.ranks import run_ranks
from torch import Tensor

from sp_core.attention.local import attention_with_lse
from sp_core.attention.masks import as_BHqk, to_additive, to_rank_order
from sp_core.attention.partial import exchanged_cross_attention, partial_cross_attention
from sp_core.attention.ring import parallel_attention, ring_attention
from sp_core.attention.ulysses import ulysses_attention
from sp_core.comm import CollectiveTransport
from sp_core.comm.ring import Ring
from sp_core.layout import FlatLayout, TileLayout
from sp_core.parallel.mesh import Meshes

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


def every_layout(rank: int, world_size: int) -> None:
    meshes = Meshes()
    layouts = [FlatLayout(29, world_size), FlatLayout(world_size - 1, world_size), TileLayout((2, 5, 3), (world_size, 1), suffix=1)]
    shapes = [(ring, world_size // ring) for ring in range(1, world_size + 1) if world_size % ring == 0]
    for layout, H, mask_kind in itertools.product(layouts, (5, 1), MASKS):
        if layout.tokens < 4 and mask_kind is not None:
            continue
        generator = torch.Generator().manual_seed(layout.tokens + H)
        q, k, v = (torch.randn(B, layout.tokens, H, D, generator=generator) for _ in range(3))
        mask = None if mask_kind is None else make_mask(mask_kind, layout.tokens, H)
        expected = layout.shard(sdpa(q, k, v, mask), rank)
        mask = None if mask is None else to_rank_order(as_BHqk(mask), layout)
        shards = [layout.shard(x, rank) for x in (q, k, v)]
        for ring_size, ulysses_size in shapes:
            mesh = meshes.build(ring=ring_size, ulysses=ulysses_size)
            transport = CollectiveTransport(mesh.ulysses.group)
            ring = Ring(mesh.ring.group, transport.stats)
            name = f"{layout.describe()} {layout.tokens} tokens, {H} heads, mask {mask_kind}, ring {ring_size} x Ulysses {ulysses_size}"
            out = parallel_attention(*shards, transport, ring, layout.counts, mask=mask)
            check(name, out, expected)
            has_heads = mesh.ulysses.rank < H
            hops = ring_size - 1 if has_heads else 0
            assert transport.stats.exchanges == (2 if ulysses_size > 1 else 0) + hops, name
            if ring_size == 1:
                check(name, ulysses_attention(*shards, transport, layout.counts, sdpa, mask=mask), expected)
    meshes.close()


@pytest.mark.parametrize("world_size", parameters(plain=[1, 2, 3, 4], campaign=[6]))
def test_every_layout_equals_one_process(world_size: int) -> None:
    run_ranks(world_size, every_layout)


def ring_details(rank: int, world_size: int) -> None:
    # blocks of any length, also none; queries and LSE; another attention that returns LSE
    ring = Ring()
    calls = []

    def other(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, Tensor]:
        calls.append(k.size(1))
        return attention_with_lse(q.double(), k.double(), v.double(), mask, scale)

    for counts in ([7, 1, 0], [0, 0, 5], [3, 3, 3]):
        T, start = sum(counts), sum(counts[:rank])
        q, k, v = (torch.randn(B, T, 3, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
        mine = [x[:, start : start + counts[rank]] for x in (q, k, v)]
        out, lse = ring_attention(*mine, ring, counts, attend=other, scale=0.2)
        expected, expected_lse = attention_with_lse(q, k, v, scale=0.2)
        check(str(counts), out, expected[:, start : start + counts[rank]])
        torch.testing.assert_close(lse.float(), expected_lse[:, :, start : start + counts[rank]])
        assert calls == [counts[(rank - hop) % 3] for hop in range(3)]
        calls.clear()
    # half types travel as they are
    q, k, v = (torch.randn(1, 9, 2, D, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    out, _ = ring_attention(*(x[:, rank * 3 : rank * 3 + 3] for x in (q, k, v)), ring, [3, 3, 3])
    torch.testing.assert_close(out, sdpa(q, k, v)[:, rank * 3 : rank * 3 + 3], atol=0.02, rtol=0.02)
    for wrong, text in (([3, 3], "2 token counts"), ([4, 3, 3], "owns")):
        if rank == 0 or text == "2 token counts":
            with pytest.raises(ValueError, match=text):
                ring_attention(*(x[:, :3] for x in (q, k, v)), ring, wrong)


def test_ring_details() -> None:
    run_ranks(3, ring_details)


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


def partial_forms(rank: int, world_size: int) -> list[bytes]:
    transport, results = CollectiveTransport(), []
    for H, mask_kind in itertools.product((4, 1), MASKS):
        counts = FlatLayout(31, world_size).counts
        start, A = sum(counts[:rank]), 6
        q, k, v = (torch.randn(B, T, H, D, generator=torch.Generator().manual_seed(i)) for i, T in enumerate((A, 31, 31)))
        mask = None if mask_kind is None else make_mask(mask_kind, 31, H)
        if mask is not None and mask.size(-2) != 1:
            mask = mask[..., :A, :]
        expected = sdpa(q, k, v, mask)
        mine = [x[:, start : start + counts[rank]] for x in (k, v)]
        for form in (partial_cross_attention, exchanged_cross_attention):
            out = form(q, *mine, transport, counts, mask=mask)
            check(f"{form.__name__}, {H} heads, mask {mask_kind}", out, expected)
            results.append(out.contiguous().numpy().tobytes())
    dist.barrier()
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_partial_cross_attention_is_exact_and_equal_on_all_ranks(world_size: int) -> None:
    first, *others = run_ranks(world_size, partial_forms)
    assert all(other == first for other in others)
