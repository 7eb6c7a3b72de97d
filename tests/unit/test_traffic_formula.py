"""The traffic formula against the field's closed forms and published figures."""

from __future__ import annotations

import pytest

from sp_core.layout import FlatLayout, TileLayout
from sp_core.planner.traffic import CrossAttention, ForwardShape, attention_bytes, cross_bytes, forward_bytes


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_divisible_sizes_give_the_ulysses_formula(world_size: int) -> None:
    S, heads, head_dim, itemsize = 4096, 32, 128, 2
    ideal = 4 * (S * heads * head_dim * itemsize / world_size) * (world_size - 1) / world_size
    counts = FlatLayout(S, world_size).counts
    assert [attention_bytes(counts, rank, 1, heads, head_dim * itemsize) for rank in range(world_size)] == [ideal] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_divisible_sizes_give_the_ring_formula(world_size: int) -> None:
    S, heads, head_dim, itemsize = 4080, 32, 128, 2
    ideal = 2 * (S * heads * head_dim * itemsize / world_size) * (world_size - 1)
    counts = FlatLayout(S, world_size).counts
    assert {attention_bytes(counts, rank, world_size, heads, head_dim * itemsize) for rank in range(world_size)} == {ideal}


# GB a rank and forward at N = 2, 4, 8
@pytest.mark.parametrize(
    ("tokens", "blocks", "heads", "figures"),
    [(75_600, 40, 40, (31.0, 23.2, 13.6)), (37_440, 48, 32, (14.7, 11.0, 6.4)), (38_592, 50, 56, (27.7, 20.8, 12.1))],
    ids=["Wan-14B 720p", "LongCat 480p", "MiniMax-H3"],
)
def test_model_figures(tokens: int, blocks: int, heads: int, figures: tuple[float, ...]) -> None:
    shape = ForwardShape(blocks=blocks, heads=heads, head_dim=128, out_channels=64)
    for world_size, figure in zip((2, 4, 8), figures, strict=True):
        assert forward_bytes(shape, FlatLayout(tokens, world_size), 0) / 1e9 == pytest.approx(figure, abs=0.06)


def test_what_all_ranks_send_is_what_all_ranks_lack() -> None:
    counts, heads = (5, 0, 7, 3), 6
    sent = sum(attention_bytes(counts, rank, 1, heads, 1) for rank in range(4))
    owned_heads = (2, 2, 1, 1)
    received_qkv = sum((15 - count) * h for count, h in zip(counts, owned_heads, strict=True))
    received_out = sum(count * (heads - h) for count, h in zip(counts, owned_heads, strict=True))
    assert sent == 3 * received_qkv + received_out


def test_one_rank_sends_nothing() -> None:
    shape = ForwardShape(blocks=2, heads=3, head_dim=4, out_channels=5, cross=CrossAttention(7, 3, 4))
    assert forward_bytes(shape, FlatLayout(11, 1), 0) == 0


def test_partial_attention_stops_growing_with_the_video() -> None:
    # LTX-2, 1280 x 704 x 121 frames on 8 ranks: 126 audio queries, 32 heads of 64
    partial, moved = CrossAttention(126, 32, 64), CrossAttention(126, 32, 64, partial=False)
    counts = FlatLayout(14_080, 8).counts
    assert cross_bytes(partial, counts, 0, 2, 1) == 126 * 28 * (64 * 2 + 4) + 4 * 126 * 64 * 2 * 7
    assert cross_bytes(partial, FlatLayout(63_240, 8).counts, 0, 2, 1) == cross_bytes(partial, counts, 0, 2, 1)
    assert cross_bytes(moved, counts, 0, 2, 1) == 2 * 1760 * 28 * 64 * 2 + 4 * 126 * 64 * 2 * 7


def test_refusals() -> None:
    shape = ForwardShape(blocks=1, heads=1, head_dim=1, out_channels=1)
    with pytest.raises(ValueError, match="ring of 3 does not divide a world of 4"):
        forward_bytes(shape, TileLayout((1, 4, 4), (2, 2)), 0, ring=3)
    with pytest.raises(ValueError, match="rank 4 is outside"):
        forward_bytes(shape, TileLayout((1, 4, 4), (2, 2)), 4)
