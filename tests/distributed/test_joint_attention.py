"""Joint text and video attention on spawned ranks against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from distributed.ranks import RankPools
from torch import Tensor

from sp_core.attention.joint import joint_attention
from sp_core.attention.masks import as_BHqk
from sp_core.comm import CollectiveTransport
from sp_core.comm.small_collectives import all_gather_bytes
from sp_core.layout import FlatLayout, SequenceLayout, TileLayout, Weights

B, D, N = 2, 8, 5


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = None if mask is None else as_BHqk(mask)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)


LAYOUTS: dict[str, Callable[[int], SequenceLayout]] = {
    "flat": lambda world_size: FlatLayout(29, world_size),
    "tiles": lambda world_size: TileLayout((2, 5, 3), (world_size, 1), prefix=2),
}


def check_case(rank: int, world_size: int, layout_name: str, H: int, masked: bool, weights: Weights | None = None) -> None:
    transport, layout = CollectiveTransport(), LAYOUTS[layout_name](world_size).weighted(weights)
    generator = torch.Generator().manual_seed(H)
    text = [torch.randn(B, N, H, D, generator=generator) for _ in range(3)]
    video = [torch.randn(B, layout.tokens, H, D, generator=generator) for _ in range(3)]
    mask = None
    if masked:  # padding among the text's keys, as HunyuanVideo has it: (1, 1, N + T)
        mask = torch.zeros(1, 1, N + layout.tokens)
        mask[..., 3:5] = torch.finfo(torch.float32).min
    both = [torch.cat(pair, 1) for pair in zip(text, video, strict=True)]
    expected = sdpa(*both, mask)
    text_rows, video_rows = expected.split([N, layout.tokens], 1)

    mine = tuple(layout.shard(x, rank) for x in video)
    out, out_text = joint_attention(mine, tuple(text), transport, layout.counts, sdpa, mask=mask, weights=weights)  # type: ignore[arg-type]
    torch.testing.assert_close(out, layout.shard(video_rows, rank), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(out_text, text_rows, atol=2e-6, rtol=2e-6)
    assert transport.stats.exchanges == 3
    everywhere = all_gather_bytes(None, out_text.contiguous().numpy().tobytes())
    assert all(other == everywhere[0] for other in everywhere), "the text differs between ranks"


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "padded text"])
# 2 heads are fewer than ranks; 24 on 5 and 7 on any count do not divide
@pytest.mark.parametrize("heads", [2, 7, 24], ids="{} heads".format)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3, 5], ids="{} ranks".format)
def test_equals_attention_over_both(ranks: RankPools, world_size: int, layout: str, heads: int, masked: bool) -> None:
    ranks.call(world_size, check_case, layout, heads, masked)


@pytest.mark.parametrize("weights", [(3, 1), (2, 1, 1), (9, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_attention_over_both_with_shares(ranks: RankPools, layout: str, weights: Weights) -> None:
    for heads in (2, 24):  # with 9:1:1 one rank has all of two heads
        ranks.call(len(weights), check_case, layout, heads, True, weights)


def check_refusal(rank: int, world_size: int) -> None:
    few, video = (tuple(torch.zeros(B, T, heads, D) for _ in range(3)) for T, heads in ((N, 3), (4, 24)))
    with pytest.raises(ValueError, match="the text has 3 heads, the video 24"):
        joint_attention(video, few, CollectiveTransport(), (4, 4), sdpa)  # type: ignore[arg-type]


def test_text_and_video_with_other_heads_are_refused(ranks: RankPools) -> None:
    ranks.call(2, check_refusal)
