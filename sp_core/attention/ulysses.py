"""Ulysses: swap token shards for head shards, attend to all tokens, swap back.

Uneven token and head counts need no padding: every rank knows all sizes. A rank may own
no head (more ranks than heads); it then only takes part in the exchanges.

Shape legend: B batch, T all tokens, t this rank's tokens, H all heads, h this rank's heads,
D head_dim. Source: DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..comm.transport import Transport
from ..layout import shard_range
from .masks import as_BHqk, cut_axis

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
    kv_token_counts: Sequence[int] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention over all ranks' tokens: (B, t, H, D) in, (B, t, H, Dv) out.

    Tensors of one shape and dtype travel in one exchange: q, k and v of a self-attention cost
    one collective in and one out.

    Args:
        token_counts: tokens of each rank of ``transport``, :attr:`SequenceLayout.counts`.
        attend: called with this rank's heads of all tokens, in rank order. Not called on a
            rank without heads.
        kv_token_counts: those of k and v when they differ from q's.
        mask: whole, in rank order (:mod:`sp_core.attention.masks`); only a mask with a head
            axis is cut. Handed to ``attend`` as its fourth argument, with four axes.

    Raises:
        ValueError: a tensor's token axis is not what ``token_counts`` says, heads differ, or
            ``attend`` returned another shape.
    """
    kv_token_counts = token_counts if kv_token_counts is None else kv_token_counts
    H = q_BtHD.size(2)
    for name, tensor in (("k", k_BtHD), ("v", v_BtHD)):
        if tensor.size(2) != H:
            raise ValueError(f"{name} has {tensor.size(2)} heads, q has {H}: repeat grouped heads first")
    q, k, v = _scatter(transport, [(q_BtHD, token_counts), (k_BtHD, kv_token_counts), (v_BtHD, kv_token_counts)])
    B, T, h, _ = q.shape
    expected = (B, T, h, v.size(3))
    if h == 0:
        out_BThD = q.new_empty(expected)
    elif mask is None:
        out_BThD = attend(q, k, v)
    else:
        start, stop = shard_range(H, transport.world_size, transport.rank)
        out_BThD = attend(q, k, v, cut_axis(as_BHqk(mask), 1, start, stop - start))
    if out_BThD.shape != expected:
        raise ValueError(f"the local attention returned shape {tuple(out_BThD.shape)} where {expected} (B, T, h, D) was due")
    return transport.gather_heads(out_BThD, H, token_counts)


def _scatter(transport: Transport, tensors: list[tuple[Tensor, Sequence[int]]]) -> list[Tensor]:
    """Token shards to head shards, neighbours of one kind in one exchange."""
    scattered: list[Tensor] = []
    while tensors:
        (first, counts), *rest = tensors
        alike = [first]
        while rest and rest[0][0].shape == first.shape and rest[0][0].dtype == first.dtype and list(rest[0][1]) == list(counts):
            alike.append(rest.pop(0)[0])
        scattered += transport.scatter_heads(alike, counts)
        tensors = rest
    return scattered
