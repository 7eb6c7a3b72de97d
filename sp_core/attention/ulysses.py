"""Ulysses: exchange token shards for head shards, attend to all tokens, exchange back.

Uneven token and head counts need no padding: every rank knows all sizes. A rank may own
no head (more ranks than heads); it then only takes part in the exchanges. Heads can go in groups,
so that the exchange of one runs beside the attention of another (:mod:`.head_groups`).

Shape legend: B batch, T all tokens, t this rank's tokens, H all heads, h this rank's heads,
D head_dim. Source: DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor

from ..comm.transport import Transport
from ..layout import Weights, shard_sizes
from .head_groups import Overlap, head_groups, heads_of, run_groups
from .masks import as_BHqk, narrow_mask

#: local attention: (q_BThD, k_BThD, v_BThD) or, if there is a mask, (q, k, v, mask) -> out_BThD
Attend = Callable[..., Tensor]
#: the same of named heads, of which there is at least one: (heads, q_BThD, k_BThD, v_BThD) -> out_BThD
AttendHeads = Callable[[range, Tensor, Tensor, Tensor], Tensor]


def ulysses_attention(
    q_BtHD: Tensor,
    k_BtHD: Tensor,
    v_BtHD: Tensor,
    transport: Transport,
    token_counts: Sequence[int],
    attend: Attend,
    *,
    mask: Tensor | None = None,
    overlap: Overlap | None = None,
    weights: Weights | None = None,
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
        overlap: exchange by groups of heads; ``attend`` is then called once for each group, and must treat heads alike. The
            result is that of one exchange, if ``attend`` gives each head what it would give it among others.
        weights: of the ranks, by which heads are shared out, in one exchange of all; None: equally.

    Raises:
        ValueError: a tensor's tokens are not what ``token_counts`` says, heads differ, or
            ``attend`` returned another shape.
    """
    mask_BHqk = None if mask is None else as_BHqk(mask)

    def attend_heads(heads: range, q_BThD: Tensor, k_BThD: Tensor, v_BThD: Tensor) -> Tensor:
        if mask_BHqk is None:
            return attend(q_BThD, k_BThD, v_BThD)
        return attend(q_BThD, k_BThD, v_BThD, narrow_mask(mask_BHqk, 1, heads.start, len(heads)))

    return attention_of_heads(q_BtHD, k_BtHD, v_BtHD, transport, token_counts, attend_heads, overlap=overlap, weights=weights)


def attention_of_heads(
    q_BtHD: Tensor,
    k_BtHD: Tensor,
    v_BtHD: Tensor,
    transport: Transport,
    token_counts: Sequence[int],
    attend: AttendHeads,
    *,
    overlap: Overlap | None = None,
    weights: Weights | None = None,
) -> Tensor:
    """:func:`ulysses_attention` with a local attention that is told which of all heads it gets."""
    H = q_BtHD.size(2)
    for name, tensor in (("k", k_BtHD), ("v", v_BtHD)):
        if tensor.size(2) != H:
            raise ValueError(f"{name} has {tensor.size(2)} heads, q has {H}: repeat grouped heads first")
    groups = head_groups(H, transport.world_size, 1 if overlap is None else overlap.groups, weights)

    def owned(group: range) -> tuple[int, ...]:
        return shard_sizes(len(group), transport.world_size, weights)

    def scatter(group: range) -> list[Tensor]:
        return _scatter(transport, [x[:, :, group.start : group.stop] for x in (q_BtHD, k_BtHD, v_BtHD)], token_counts, owned(group))

    def on_own_heads(group: range, shards_BThD: list[Tensor]) -> Tensor:
        return _attended(attend, heads_of(group, transport.world_size, transport.rank, weights), *shards_BThD)

    if overlap is None or len(groups) == 1:
        [everything] = groups
        return transport.gather_heads(on_own_heads(everything, scatter(everything)), H, token_counts, owned(everything))
    outputs_BtHD: list[Tensor] = []

    def on_group(group: range, shards_BThD: list[Tensor]) -> Tensor:
        out_BThD = on_own_heads(group, shards_BThD)
        if not outputs_BtHD:  # only now is its dtype known
            outputs_BtHD.append(out_BThD.new_empty(*q_BtHD.shape[:3], v_BtHD.size(3)))
        return out_BThD

    def gather(group: range, out_BThD: Tensor) -> None:
        # at once, so that a receive slot is held no longer than it takes
        out_BtHD = transport.gather_heads(out_BThD, len(group), token_counts, owned(group))
        outputs_BtHD[0][:, :, group.start : group.stop].copy_(out_BtHD)

    run_groups(groups, scatter, on_group, gather, overlap.lane)
    return outputs_BtHD[0]


def _attended(attend: AttendHeads, heads: range, q_BThD: Tensor, k_BThD: Tensor, v_BThD: Tensor) -> Tensor:
    expected = (*q_BThD.shape[:3], v_BThD.size(3))
    out_BThD = attend(heads, q_BThD, k_BThD, v_BThD) if heads else q_BThD.new_empty(expected)
    if out_BThD.shape != expected:
        raise ValueError(f"the local attention returned shape {tuple(out_BThD.shape)} where {expected} (B, T, h, D) was due")
    return out_BThD


def _scatter(transport: Transport, tensors: list[Tensor], token_counts: Sequence[int], head_counts: Sequence[int]) -> list[Tensor]:
    """Token shards to head shards; neighbours of one shape and dtype in one exchange."""
    scattered: list[Tensor] = []
    for _, alike in itertools.groupby(tensors, key=lambda x: (x.shape, x.dtype)):
        scattered += transport.scatter_heads(list(alike), token_counts, head_counts)
    return scattered
