"""Ulysses: exchange token shards for head shards, attend to all tokens, exchange back.

Uneven token and head counts need no padding: every rank knows all sizes. A rank may own
no head (more ranks than heads); it then only takes part in the exchanges.

Shape legend: B batch, T all tokens, t this rank's tokens, H all heads, h this rank's heads,
D head_dim. Source: DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor

from ..comm.transport import Transport
from ..layout import shard_range
from .masks import as_BHqk, narrow_mask

#: local attention: (q_BThD, k_BThD, v_BThD) or, if there is a mask, (q, k, v, mask) -> out_BThD
Attend = Callable[..., Tensor]


def ulysses_attention(
    q_BtHD: Tensor,
    k_BtHD: Tensor,
    v_BtHD: Tensor,
    transport: Transport,
    token_counts: Sequence[int],
    attend: Attend,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention over all ranks' tokens: (B, t, H, D) in, (B, t, H, Dv) out.

    Tensors of one shape and dtype go in one exchange: q, k and v of a self-attention cost
    one collective in and one out.

    Args:
        token_counts: tokens of each rank of ``transport``, :attr:`SequenceLayout.counts`.
        attend: called with this rank's heads of all tokens, in rank order. Not called on a
            rank without heads.
        mask: of all T tokens, in rank order (:mod:`sp_core.attention.masks`). A mask with heads is
            narrowed to this rank's. ``attend`` gets it as its fourth argument, with four dims.

    Raises:
        ValueError: a tensor's tokens are not what ``token_counts`` says, heads differ, or
            ``attend`` returned another shape.
    """
    H = q_BtHD.size(2)
    for name, tensor in (("k", k_BtHD), ("v", v_BtHD)):
        if tensor.size(2) != H:
            raise ValueError(f"{name} has {tensor.size(2)} heads, q has {H}: repeat grouped heads first")
    q, k, v = _scatter(transport, [q_BtHD, k_BtHD, v_BtHD], token_counts)
    B, T, h, _ = q.shape
    expected = (B, T, h, v.size(3))
    if h == 0:
        out_BThD = q.new_empty(expected)
    elif mask is None:
        out_BThD = attend(q, k, v)
    else:
        start, stop = shard_range(H, transport.world_size, transport.rank)
        out_BThD = attend(q, k, v, narrow_mask(as_BHqk(mask), 1, start, stop - start))
    if out_BThD.shape != expected:
        raise ValueError(f"the local attention returned shape {tuple(out_BThD.shape)} where {expected} (B, T, h, D) was due")
    return transport.gather_heads(out_BThD, H, token_counts)


def _scatter(transport: Transport, tensors: list[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
    """Token shards to head shards; neighbours of one shape and dtype in one exchange."""
    scattered: list[Tensor] = []
    for _, alike in itertools.groupby(tensors, key=lambda x: (x.shape, x.dtype)):
        scattered += transport.scatter_heads(list(alike), token_counts)
    return scattered
