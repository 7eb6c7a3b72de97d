"""A small replicated query against keys and values that are spread over the ranks.

Video-to-audio attention has about a hundred audio queries, whole on every rank, and tens of
thousands of video keys. Instead of moving the keys, every rank attends to its own and the
small results are merged by log-sum-exp: exact, and the bytes do not grow with the video.
:func:`exchanged_cross_attention` is the usual form, for comparison.

Shape legend: B batch, A query tokens (whole everywhere), t this rank's key tokens, T all,
H all heads, h this rank's heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.transport import Transport
from ..layout import shard_range, shard_sizes
from .local import AttentionWithLse, attention_with_lse, merge
from .masks import as_BHqk, check_mask, cut_axis, level_rows


def partial_cross_attention(
    q_BAHD: Tensor,
    k_BtHD: Tensor,
    v_BtHD: Tensor,
    transport: Transport,
    token_counts: Sequence[int],
    *,
    attend: AttentionWithLse = attention_with_lse,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Every query over all ranks' keys, all heads, on every rank: (B, A, H, Dv), same bits everywhere.

    Two exchanges, like the usual form, but of results: each rank gets the partial results of
    its heads, merges them, and the merged heads are gathered.

    Args:
        q_BAHD: equal on all ranks.
        token_counts: key tokens of each rank.
        mask: whole, keys in rank order (:mod:`sp_core.attention.masks`).

    Raises:
        ValueError: the key axis is not what ``token_counts`` says; the mask does not fit.
    """
    (B, A, H, _), world_size = q_BAHD.shape, transport.world_size
    _check_keys(k_BtHD, token_counts, transport)
    if mask is not None:
        mask = as_BHqk(mask)
        check_mask(mask, (B, H, A, sum(token_counts)))
        if mask.dtype != torch.bool:
            q_BAHD, shift = level_rows(q_BAHD, mask)
            mask = mask - shift
        mask = cut_axis(mask, 3, sum(token_counts[: transport.rank]), k_BtHD.size(1))
    out_BAHD, lse_BHA = attend(q_BAHD, k_BtHD, v_BtHD, mask, scale)
    if world_size == 1:
        return out_BAHD
    # lse rides along as extra channels, its bytes read as out's type: (B, A, H, Dv + 2) for half types
    lse_BAH1 = lse_BHA.transpose(1, 2).contiguous()[..., None]
    packed = torch.cat([out_BAHD, lse_BAH1.view(out_BAHD.dtype)], dim=-1)
    [mine_BnAhC] = transport.scatter_heads([packed], [A] * world_size)
    parts = [_unpack(part, out_BAHD.size(-1), lse_BHA.dtype) for part in mine_BnAhC.split(A, dim=1)]
    return _gather_by_heads(merge(parts)[0].to(q_BAHD.dtype), H, transport)


def exchanged_cross_attention(
    q_BAHD: Tensor,
    k_BtHD: Tensor,
    v_BtHD: Tensor,
    transport: Transport,
    token_counts: Sequence[int],
    *,
    attend: AttentionWithLse = attention_with_lse,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The same result as :func:`partial_cross_attention` by moving k and v to head shards.

    Each rank attends with its heads' queries; outputs of all heads are gathered. Source: LTX-2's
    sequence parallelism (there with H divisible by the ranks and without a mask).
    """
    B, A, H, _ = q_BAHD.shape
    start, stop = shard_range(H, transport.world_size, transport.rank)
    if k_BtHD.shape == v_BtHD.shape:
        k, v = transport.scatter_heads([k_BtHD, v_BtHD], token_counts)
    else:
        [k], [v] = transport.scatter_heads([k_BtHD], token_counts), transport.scatter_heads([v_BtHD], token_counts)
    if mask is not None:
        mask = as_BHqk(mask)
        check_mask(mask, (B, H, A, sum(token_counts)))
        mask = cut_axis(mask, 1, start, stop - start)
    out_BAhD, _ = attend(q_BAHD[:, :, start:stop], k, v, mask, scale)
    return _gather_by_heads(out_BAhD, H, transport)


def _unpack(part_BAhC: Tensor, value_dim: int, lse_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out_BAhD, lse_BhA) of one rank's partial result."""
    out_BAhD, lse_BAhC = part_BAhC.split([value_dim, part_BAhC.size(-1) - value_dim], dim=-1)
    return out_BAhD, lse_BAhC.contiguous().view(lse_dtype).squeeze(-1).transpose(1, 2)


def _gather_by_heads(out_BAhD: Tensor, num_heads: int, transport: Transport) -> Tensor:
    """All heads on every rank. Heads go first, as a gather joins dim 1: (B, h, A, D) to (B, H, A, D)."""
    out_BHAD = transport.all_gather_tokens(out_BAhD.transpose(1, 2), shard_sizes(num_heads, transport.world_size))
    return out_BHAD.transpose(1, 2)


def _check_keys(k_BtHD: Tensor, token_counts: Sequence[int], transport: Transport) -> None:
    if len(token_counts) != transport.world_size or k_BtHD.size(1) != token_counts[transport.rank]:
        raise ValueError(
            f"rank {transport.rank} of {transport.world_size} has {k_BtHD.size(1)} key tokens; token counts are {tuple(token_counts)}"
        )
