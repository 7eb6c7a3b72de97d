"""The exchange as functions on a process group, under the names that LTX-2 gave them.

Shape legend: B batch, T all tokens, t this rank's tokens, H all heads, h this rank's heads,
D head_dim, C channels. Any element type; every function is pure data movement. Inside the
extension the same work goes through a :class:`Transport`, which counts it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ..comm.transports.collective import CollectiveTransport


def send_recv_heads(*tensors_BtHD: Tensor, token_counts: Sequence[int], group: dist.ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Token shards to head shards: each (B, t, H, D) becomes (B, T, h, D), all in one collective.

    Rank r keeps the r-th contiguous range of ceil/floor(H / world) heads; T is in rank order.

    Raises:
        ValueError: ``token_counts`` does not fit the group or the tensors; shapes or dtypes differ.

    Source: LTX-2 (there heads and tokens must divide).
    """
    return tuple(CollectiveTransport(group).scatter_heads(tensors_BtHD, token_counts))


def gather_heads(tensor_BThD: Tensor, *, num_heads: int, token_counts: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """Head shards back to token shards, (B, T, h, D) to (B, t, H, D): the inverse of :func:`send_recv_heads`.

    Raises:
        ValueError: ``token_counts`` does not fit the group or the tensor, ``num_heads`` not its heads.

    Source: LTX-2.
    """
    return CollectiveTransport(group).gather_heads(tensor_BThD, num_heads, token_counts)


def gather_output_tokens(
    tensor_BtC: Tensor,
    token_counts: Sequence[int],
    original_tokens: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """All ranks' output tokens on every rank: (B, t, C) becomes (B, T, C).

    Pads to the longest shard, all-gathers, trims by the real counts; then cuts the sequence to
    ``original_tokens``, which drops what :func:`pad_modality_for_uniform_sharding` added.

    Raises:
        ValueError: ``token_counts`` does not fit; more ``original_tokens`` than there are.

    Source: LTX-2.
    """
    total = sum(token_counts)
    if original_tokens is not None and not 0 <= original_tokens <= total:
        raise ValueError(f"cannot unpad {total} gathered tokens to {original_tokens}")
    return CollectiveTransport(group).all_gather_tokens(tensor_BtC, token_counts)[:, :original_tokens]
