"""Replicated tokens whose attention was split by heads, put together on every rank.

Shape legend: B batch, N replicated tokens, h this rank's heads, H all heads, D head_dim.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from ..comm.transport import Transport
from ..layout import Weights, shard_sizes


def all_gather_heads(out_BNhD: Tensor, num_heads: int, transport: Transport, weights: Weights | None = None) -> Tensor:
    """All heads on every rank: (B, N, h, D) to (B, N, H, D). One collective.

    Args:
        num_heads: H; rank r holds the r-th of its contiguous shards.
        weights: by which heads were shared out; None: equally.
    """
    # heads go first, because the transport joins dim 1
    out_BhND = rearrange(out_BNhD, "B N h D -> B h N D").contiguous()
    out_BHND = transport.all_gather_tokens(out_BhND, shard_sizes(num_heads, transport.world_size, weights))
    return rearrange(out_BHND, "B H N D -> B N H D")
