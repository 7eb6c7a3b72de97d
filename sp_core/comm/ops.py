"""Exchanges as operators of torch, so that a compiled model runs through them without a break in its graph.

:func:`traceable` wraps a transport; its calls are the operators ``sequence_parallel::scatter_heads``, ``::gather_heads`` and
``::all_gather_tokens``. Output shapes follow from the arguments alone, for even and uneven shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .transport import Transport

# An operator's schema can carry a number but no object, so a number it is. Entries go with their transport.
_transports: WeakValueDictionary[int, Transport] = WeakValueDictionary()
_numbers = count()


class TraceableTransport(Transport):
    """A transport whose calls are operators. Owns ``inner``."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.world_size)
        self.inner = inner
        self.name = inner.name
        self.stats = inner.stats
        self.number = next(_numbers)
        _transports[self.number] = inner

    def scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
        H = tensors_BtHD[0].shape[2]
        # shard_sizes(H)[rank], in operations that work on a symbolic size
        heads = H // self.world_size + (1 if self.rank < H % self.world_size else 0)
        return scatter_heads(list(tensors_BtHD), list(token_counts), heads, self.number)

    def gather_heads(self, tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int]) -> Tensor:
        return gather_heads(tensor_BThD, num_heads, list(token_counts), self.rank, self.number)

    def all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        return all_gather_tokens(tensor_Bt, list(token_counts), self.number)

    def check(self) -> None:
        self.inner.check()

    def trim(self) -> None:
        self.inner.trim()

    def close(self) -> None:
        self.inner.close()


def traceable(transport: Transport) -> TraceableTransport:
    """The transport, for use inside ``torch.compile``."""
    return TraceableTransport(transport)


@torch.library.custom_op("sequence_parallel::scatter_heads", mutates_args=())
def scatter_heads(tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], heads: int, transport: int) -> list[Tensor]:
    """(B, t, H, D) each to (B, T, heads, D), where ``heads`` is how many of H this rank owns."""
    outputs = _transports[transport].scatter_heads(tensors_BtHD, token_counts)
    return [_unaliased(output, tensor) for output, tensor in zip(outputs, tensors_BtHD, strict=True)]


@scatter_heads.register_fake
def _(tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], heads: int, transport: int) -> list[Tensor]:
    return [x.new_empty((x.shape[0], sum(token_counts), heads, x.shape[3])) for x in tensors_BtHD]


@torch.library.custom_op("sequence_parallel::gather_heads", mutates_args=())
def gather_heads(tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int], rank: int, transport: int) -> Tensor:
    """(B, T, h, D) to (B, token_counts[rank], num_heads, D)."""
    return _unaliased(_transports[transport].gather_heads(tensor_BThD, num_heads, token_counts), tensor_BThD)


@gather_heads.register_fake
def _(tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int], rank: int, transport: int) -> Tensor:
    return tensor_BThD.new_empty((tensor_BThD.shape[0], token_counts[rank], num_heads, tensor_BThD.shape[3]))


@torch.library.custom_op("sequence_parallel::all_gather_tokens", mutates_args=())
def all_gather_tokens(tensor_Bt: Tensor, token_counts: Sequence[int], transport: int) -> Tensor:
    """(B, t, ...) to (B, T, ...)."""
    return _unaliased(_transports[transport].all_gather_tokens(tensor_Bt, token_counts), tensor_Bt)


@all_gather_tokens.register_fake
def _(tensor_Bt: Tensor, token_counts: Sequence[int], transport: int) -> Tensor:
    return tensor_Bt.new_empty((tensor_Bt.shape[0], sum(token_counts), *tensor_Bt.shape[2:]))


def _unaliased(output: Tensor, source: Tensor) -> Tensor:
    """One rank alone gets its input back, which an operator must not return."""
    return output.clone() if output.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() else output
