"""Joint text and video attention on spawned ranks against one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from distributed.ranks import run_ranks
from torch import Tensor

from sp_core.attention.joint import joint_attention
from sp_core.attention.masks import as_BHqk
from sp_core.comm import CollectiveTransport
from sp_core.comm.small_collectives import all_gather_bytes
from sp_core.layout import FlatLayout, TileLayout

B, D, N = 2, 8, 5


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = None if mask is None else as_BHqk(mask)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)


def every_case(rank: int, world_size: int) -> int:
    transport = CollectiveTransport()
    layouts = [FlatLayout(29, world_size), TileLayout((2, 5, 3), (world_size, 1), prefix=2)]
    cases = 0
    # 2 heads are fewer than ranks; 24 on 5 and 7 on any count do not divide
    for layout, H, masked in itertools.product(layouts, (2, 7, 24), (False, True)):
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

        transport.stats.reset()
        mine = tuple(layout.shard(x, rank) for x in video)
        out, out_text = joint_attention(mine, tuple(text), transport, layout.counts, sdpa, mask=mask)  # type: ignore[arg-type]
        torch.testing.assert_close(out, layout.shard(video_rows, rank), atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(out_text, text_rows, atol=2e-6, rtol=2e-6)
        assert transport.stats.exchanges == 3
        everywhere = all_gather_bytes(None, out_text.contiguous().numpy().tobytes())
        assert all(other == everywhere[0] for other in everywhere), "the text differs between ranks"
        cases += 1
    few = tuple(torch.zeros(B, N, 3, D) for _ in range(3))
    with pytest.raises(ValueError, match="the text has 3 heads, the video 24"):
        joint_attention(mine, few, transport, layout.counts, sdpa)  # type: ignore[arg-type]
    return cases


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_equals_attention_over_both(world_size: int) -> None:
    assert run_ranks(world_size, every_case) == [12] * world_size
