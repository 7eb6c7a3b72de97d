"""The exchange as functions on a process group, under the names that LTX-2 gave them.

Shape legend: B batch, T all tokens, t this rank's tokens, H all heads, h this rank's heads,
D head_dim, C channels. Any element type; the functions only move data. Inside the
extension the same exchanges go through a :class:`Transport`, which counts them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ..comm.transports.collective import CollectiveTransport
from ..layout import shard_sizes


def send_recv_heads(*tensors_BtHD: Tensor, token_counts: Sequence[int], group: dist.ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Token shards to head shards: each (B, t, H, D) becomes (B, T, h, D), all in one collective.

    Rank r keeps the r-th contiguous range of ceil/floor(H / world) heads; T is in rank order.

    Raises:
        ValueError: ``token_counts`` does not fit the group or the tensors; shapes or dtypes differ.

    Source: LTX-2 (there heads and tokens must divide).
    """
    transport = CollectiveTransport(group)
    first = tensors_BtHD[0]
    for tensor in tensors_BtHD:
        if tensor.dim() != 4 or tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ValueError(
                f"tensors that are exchanged together are (B, t, H, D) of one shape and dtype, got {tuple(first.shape)} {first.dtype} "
                f"and {tuple(tensor.shape)} {tensor.dtype}"
            )
    _check_tokens(first.size(1), token_counts[transport.rank : transport.rank + 1], token_counts, transport)
    return tuple(transport.scatter_heads(tensors_BtHD, token_counts))


def gather_heads(tensor_BThD: Tensor, *, num_heads: int, token_counts: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """Head shards back to token shards, (B, T, h, D) to (B, t, H, D): the inverse of :func:`send_recv_heads`.

    Raises:
        ValueError: ``token_counts`` does not fit the group or the tensor, ``num_heads`` not its heads.

    Source: LTX-2.
    """
    transport = CollectiveTransport(group)
    _check_tokens(tensor_BThD.size(1), token_counts, token_counts, transport)
    heads = shard_sizes(num_heads, transport.world_size)[transport.rank]
    if tensor_BThD.size(2) != heads:
        raise ValueError(
            f"rank {transport.rank} of {transport.world_size} owns {heads} of {num_heads} heads, but dim 2 has {tensor_BThD.size(2)}"
        )
    return transport.gather_heads(tensor_BThD, num_heads, token_counts)


def gather_output_tokens(
    tensor_BtC: Tensor,
    token_counts: Sequence[int],
    original_tokens: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """All ranks' output tokens on every rank: (B, t, C) becomes (B, T, C).

    Pads to the longest shard, all-gathers, trims by the real counts. Then only the first
    ``original_tokens`` are kept, which drops what :func:`pad_modality_for_uniform_sharding` added.

    Raises:
        ValueError: ``token_counts`` does not fit; more ``original_tokens`` than there are.

    Source: LTX-2.
    """
    transport = CollectiveTransport(group)
    _check_tokens(tensor_BtC.size(1), token_counts[transport.rank : transport.rank + 1], token_counts, transport)
    total = sum(token_counts)
    if original_tokens is not None and not 0 <= original_tokens <= total:
        raise ValueError(f"cannot unpad {total} gathered tokens to {original_tokens}")
    return transport.all_gather_tokens(tensor_BtC, token_counts)[:, :original_tokens]


def _check_tokens(have: int, due: Sequence[int], token_counts: Sequence[int], transport: CollectiveTransport) -> None:
    if len(token_counts) != transport.world_size:
        raise ValueError(f"{len(token_counts)} token counts were given for {transport.world_size} ranks")
    if have != sum(due):
        raise ValueError(
            f"dim 1 has {have} tokens, but rank {transport.rank} of {transport.world_size} was to bring {sum(due)} of {tuple(token_counts)}"
        )
