"""Ring attention: queries stay, blocks of K and V travel around the ring, partial results are merged.

While a rank attends to one block, the next one is already on its way into a second buffer. So the
exchange hides behind the attention when blocks are long enough. Any head count works, because
heads are not sharded. Blocks may have different lengths, or none.

torch's own building blocks, and why they are only half used: the kernels that return
log-sum-exp (``aten::_scaled_dot_product_*``) are used, in :mod:`.local`. The one public
ring, ``torch.distributed.tensor.experimental.context_parallel``, is not: it replaces
``scaled_dot_product_attention`` process-wide while active, takes equal shards only, no
mask, and rotates with all-gather or all-to-all. Its templates (``_templated_ring_attention``)
and merger are private, with the same limits.

Shape legend: B batch, t tokens of one rank, T tokens of the ring, H heads, D head_dim, Dv head_dim of the values. Source: Ring
Attention (Liu et al., arXiv 2310.01889); the merge is FlashAttention's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..comm.ring_shift import Ring, block_bytes
from ..comm.transport import Transport
from ..layout import Weights
from .local import AttentionWithLse, attention_with_lse, merge
from .masks import as_BHqk, check_mask, level_rows, narrow_mask
from .ulysses import ulysses_attention


def ring_attention(
    q_BtHD: Tensor,
    k_BtHD: Tensor,
    v_BtHD: Tensor,
    ring: Ring,
    token_counts: Sequence[int],
    *,
    attend: AttentionWithLse = attention_with_lse,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the K and V of all ranks of ``ring``. Forward only.

    Args:
        q_BtHD: (B, t, H, D), t = ``token_counts[rank]``; k likewise, v (B, t, H, Dv).
        token_counts: tokens of each rank.
        attend: local attention that returns log-sum-exp.
        mask: of all T tokens, in rank order (:mod:`sp_core.attention.masks`).
        scale: D ** -0.5 when not given.

    Returns:
        out (B, t, H, Dv) in q's dtype and lse (B, H, t), as :func:`attention_with_lse`.

    Raises:
        ValueError: the number of tokens is not what ``token_counts`` says; the mask does not fit.
    """
    t = q_BtHD.size(1)
    if len(token_counts) != ring.world_size:
        raise ValueError(f"{len(token_counts)} token counts were given for a ring of {ring.world_size} ranks")
    if not t == k_BtHD.size(1) == v_BtHD.size(1) == token_counts[ring.rank]:
        raise ValueError(
            f"rank {ring.rank} of a ring of {ring.world_size} owns {token_counts[ring.rank]} tokens, "
            f"but q, k and v have {t}, {k_BtHD.size(1)} and {v_BtHD.size(1)}"
        )
    starts, shift_BHt1 = [0, *accumulate(token_counts)], None
    if mask is not None:
        q_BtHD, mask, shift_BHt1 = _own_queries(q_BtHD, mask, ring, starts)

    parts: list[tuple[Tensor, Tensor]] = []
    for source, (k, v) in _travelling_blocks(k_BtHD, v_BtHD, ring, token_counts):
        block_mask = None if mask is None else narrow_mask(mask, 3, starts[source], token_counts[source])
        if block_mask is not None and shift_BHt1 is not None:
            block_mask = block_mask - shift_BHt1
        parts.append(attend(q_BtHD, k, v, block_mask, scale))
        if len(parts) == 2:  # at once, so that the memory does not grow with the ring
            parts = [merge(parts)]
    [(out, lse)] = parts
    return out.to(q_BtHD.dtype), lse if shift_BHt1 is None else lse + shift_BHt1.squeeze(-1)


def _own_queries(q_BtHD: Tensor, mask: Tensor, ring: Ring, starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, the mask's rows of this rank's queries, and what to subtract from each row (:func:`level_rows`), if anything."""
    B, t, H, _ = q_BtHD.shape
    mask = as_BHqk(mask)
    check_mask(mask, (B, H, starts[-1], starts[-1]))
    mask = narrow_mask(mask, 2, starts[ring.rank], t)
    if mask.dtype == torch.bool or ring.world_size == 1:
        return q_BtHD, mask, None
    q_BtHD, shift_BHt1 = level_rows(q_BtHD, mask)
    return q_BtHD, mask, shift_BHt1


def usp_attention(
    q_BtHD: Tensor,
    k_BtHD: Tensor,
    v_BtHD: Tensor,
    ulysses: Transport,
    ring: Ring,
    token_counts: Sequence[int],
    *,
    attend: AttentionWithLse = attention_with_lse,
    mask: Tensor | None = None,
    scale: float | None = None,
    weights: Weights | None = None,
) -> Tensor:
    """Ulysses within each row of the mesh, a ring across rows: (B, t, H, D) in, (B, t, H, Dv) out.

    Args:
        token_counts: tokens of every rank of the product, in the mesh's order: rank
            ``ring_rank * ulysses_size + ulysses_rank``.
        mask: of all their tokens, in that rank order.
        weights: of the ranks of a row, by which heads are shared out; the same in all rows, as a column passes on the same heads.

    The other arguments and errors are those of :func:`ulysses_attention` and
    :func:`ring_attention`. Source: USP (Fang and Zhao, arXiv 2405.07719).
    """
    width = ulysses.world_size
    if len(token_counts) != width * ring.world_size:
        raise ValueError(f"{len(token_counts)} token counts were given for a mesh of ring {ring.world_size} x Ulysses {width}")
    rows = [tuple(token_counts[start : start + width]) for start in range(0, len(token_counts), width)]

    def across_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return ring_attention(q, k, v, ring, [sum(row) for row in rows], attend=attend, mask=mask, scale=scale)[0]

    return ulysses_attention(q_BtHD, k_BtHD, v_BtHD, ulysses, rows[ring.rank], across_rows, mask=mask, weights=weights)


def _travelling_blocks(k_BtHD: Tensor, v_BtHD: Tensor, ring: Ring, token_counts: Sequence[int]):
    """Yield (source rank, (k, v)) for all ranks' blocks, own block first, each sent on while in use."""
    B, t, H, D = k_BtHD.shape
    Dv, dtype, N = v_BtHD.size(3), k_BtHD.dtype, ring.world_size

    def shapes(tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (B, tokens, H, D), (B, tokens, H, Dv)

    source, blocks = ring.rank, (k_BtHD, v_BtHD)
    if N > 1:
        # K and V as one run of bytes: one message a hop, any element type
        current = torch.empty(block_bytes(*shapes(t), dtype.itemsize), dtype=torch.uint8, device=k_BtHD.device)
        for mine, packed in zip(blocks, _unpack(current, *shapes(t), dtype), strict=True):
            packed.copy_(mine)
    for hop in range(N):
        works = []
        if hop < N - 1:
            coming = token_counts[(source - 1) % N]
            arriving = torch.empty(block_bytes(*shapes(coming), dtype.itemsize), dtype=torch.uint8, device=k_BtHD.device)
            works = ring.start_shift(current, arriving)
        yield source, blocks
        if works:
            ring.finish_shift(works)
            current, source = arriving, (source - 1) % N
            blocks = _unpack(current, *shapes(token_counts[source]), dtype)


def _unpack(block: Tensor, shape_k: tuple[int, ...], shape_v: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views (k, v) of a block's bytes."""
    size_k, size_v = torch.Size(shape_k).numel() * dtype.itemsize, torch.Size(shape_v).numel() * dtype.itemsize
    k, v = block[:size_k], block[size_k : size_k + size_v]
    return k.view(dtype).view(shape_k), v.view(dtype).view(shape_v)
