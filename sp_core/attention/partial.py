"""Few replicated queries against keys and values that are sharded over the ranks.

Video-to-audio attention has about a hundred audio queries, which every rank holds, and tens of
thousands of video keys. Every rank attends to its own keys, and the small results are merged by
log-sum-exp. The merge is exact, and the bytes sent do not grow with the video.
:func:`exchanged_cross_attention` moves the keys instead; attentions that return no log-sum-exp need it.

Shape legend: B batch, A query tokens (replicated), t this rank's key tokens, T all key tokens,
H all heads, h this rank's heads, D head_dim, Dv head_dim of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from ..comm.transport import Transport
from ..layout import shard_range
from .local import AttentionWithLse, attention_with_lse, merge
from .masks import as_BHqk, check_mask, level_rows, narrow_mask
from .replicated_heads import all_gather_heads


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

    Two exchanges, both of results: each rank gets all ranks' partial results of its heads and
    merges them, and the merged heads are gathered.

    Args:
        q_BAHD: equal on all ranks.
        token_counts: key tokens of each rank.
        mask: of all T keys, in rank order (:mod:`sp_core.attention.masks`).

    Raises:
        ValueError: the number of keys is not what ``token_counts`` says; the mask does not fit.
    """
    (B, A, H, _), world_size = q_BAHD.shape, transport.world_size
    _check_keys(k_BtHD, token_counts, transport)
    if mask is not None:
        mask = as_BHqk(mask)
        check_mask(mask, (B, H, A, sum(token_counts)))
        if mask.dtype != torch.bool:
            q_BAHD, shift = level_rows(q_BAHD, mask)
            mask = mask - shift
        mask = narrow_mask(mask, 3, sum(token_counts[: transport.rank]), k_BtHD.size(1))
    out_BAHD, lse_BHA = attend(q_BAHD, k_BtHD, v_BtHD, mask, scale)
    if world_size == 1:
        return out_BAHD
    # lse rides along as extra channels, its bytes read as out's type: (B, A, H, Dv + 2) for half types
    lse_BAH1 = rearrange(lse_BHA, "B H A -> B A H 1").contiguous()
    packed_BAHC = torch.cat([out_BAHD, lse_BAH1.view(out_BAHD.dtype)], dim=-1)
    # every rank's A rows, one rank after the other
    [all_parts_BRhC] = transport.scatter_heads([packed_BAHC], [A] * world_size)
    parts = [_unpack(part_BAhC, out_BAHD.size(-1), lse_BHA.dtype) for part_BAhC in all_parts_BRhC.split(A, dim=1)]
    return all_gather_heads(merge(parts)[0].to(q_BAHD.dtype), H, transport)


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
    """The result of :func:`partial_cross_attention`, by exchanging k and v for head shards.

    Each rank attends with its heads' queries, and the outputs of all heads are gathered. The
    log-sum-exp of ``attend`` is not used. Source: LTX-2's sequence parallelism (there H divides by
    the ranks and there is no mask).
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
        mask = narrow_mask(mask, 1, start, stop - start)
    out_BAhD, _ = attend(q_BAHD[:, :, start:stop], k, v, mask, scale)
    return all_gather_heads(out_BAhD, H, transport)


def _unpack(part_BAhC: Tensor, value_dim: int, lse_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out_BAhD, lse_BhA) of one rank's partial result."""
    out_BAhD, lse_BAhC = part_BAhC.split([value_dim, part_BAhC.size(-1) - value_dim], dim=-1)
    return out_BAhD, rearrange(lse_BAhC.contiguous().view(lse_dtype), "B A h 1 -> B h A")


def _check_keys(k_BtHD: Tensor, token_counts: Sequence[int], transport: Transport) -> None:
    if len(token_counts) != transport.world_size or k_BtHD.size(1) != token_counts[transport.rank]:
        raise ValueError(
            f"rank {transport.rank} of {transport.world_size} has {k_BtHD.size(1)} key tokens; token counts are {tuple(token_counts)}"
        )
