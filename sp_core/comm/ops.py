"""Exchanges as operators of torch, for code of one's own that is compiled without a break in its graph.

Models of ComfyUI have a coarser operator, of a whole attention with its exchanges: :mod:`sp_core.attention.operators`.

:func:`traceable` wraps a transport; its calls are the operators ``sequence_parallel::scatter_heads``, ``::gather_heads`` and
``::all_gather_tokens``. Output shapes follow from the arguments alone, for even and uneven shards.

Shape legend as in :mod:`.transport`: a small letter is this rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .transport import Transport

# An operator's schema can carry a number but no object, so a number it is. Entries go with their transport.
_transports: WeakValueDictionary[int, Transport] = WeakValueDictionary()
_numbers = count()


@Transport.register
class TraceableTransport:
    """A transport whose three exchanges are operators; everything else of it is that of ``inner``, which it owns.

    It counts nothing itself: the operators call ``inner``, which checks, counts and says that this rank waits.
    """

    def __init__(self, inner: Transport) -> None:
        # past __setattr__, which hands everything on to inner
        self.__dict__.update(inner=inner, number=next(_numbers))
        _transports[self.number] = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
        H = tensors_BtHD[0].shape[2]
        # shard_sizes(H)[rank], in operations that work on a symbolic size
        heads = H // self.world_size + (1 if self.rank < H % self.world_size else 0)
        return scatter_heads(list(tensors_BtHD), list(token_counts), heads, self.number)

    def gather_heads(self, tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int]) -> Tensor:
        return gather_heads(tensor_BThD, num_heads, list(token_counts), self.rank, self.number)

    def all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        return all_gather_tokens(tensor_Bt, list(token_counts), self.number)


def traceable(transport: Transport) -> TraceableTransport:
    """The transport, for use inside ``torch.compile``."""
    return TraceableTransport(transport)


@torch.library.custom_op("sequence_parallel::scatter_heads", mutates_args=())
def scatter_heads(tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], heads: int, transport: int) -> list[Tensor]:
    """(B, t, H, D) each to (B, T, heads, D), where ``heads`` is how many of H this rank owns."""
    return _separate(_transports[transport].scatter_heads(tensors_BtHD, token_counts), tensors_BtHD)


@scatter_heads.register_fake
def _(tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], heads: int, transport: int) -> list[Tensor]:
    return [x.new_empty((x.shape[0], sum(token_counts), heads, x.shape[3])) for x in tensors_BtHD]


@torch.library.custom_op("sequence_parallel::gather_heads", mutates_args=())
def gather_heads(tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int], rank: int, transport: int) -> Tensor:
    """(B, T, h, D) to (B, token_counts[rank], num_heads, D)."""
    return _separate([_transports[transport].gather_heads(tensor_BThD, num_heads, token_counts)], [tensor_BThD])[0]


@gather_heads.register_fake
def _(tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int], rank: int, transport: int) -> Tensor:
    return tensor_BThD.new_empty((tensor_BThD.shape[0], token_counts[rank], num_heads, tensor_BThD.shape[3]))


@torch.library.custom_op("sequence_parallel::all_gather_tokens", mutates_args=())
def all_gather_tokens(tensor_Bt: Tensor, token_counts: Sequence[int], transport: int) -> Tensor:
    """(B, t, ...) to (B, T, ...)."""
    return _separate([_transports[transport].all_gather_tokens(tensor_Bt, token_counts)], [tensor_Bt])[0]


@all_gather_tokens.register_fake
def _(tensor_Bt: Tensor, token_counts: Sequence[int], transport: int) -> Tensor:
    return tensor_Bt.new_empty((tensor_Bt.shape[0], sum(token_counts), *tensor_Bt.shape[2:]))


def _separate(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, copied where one shares memory with an input or with another output: torch refuses such an operator.

    A rank alone gets its inputs back; all others get memory of their own and pay nothing here.
    """
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    separate = []
    for output in outputs:
        separate.append(output.clone() if output.untyped_storage()._cdata in seen else output)
        seen.add(separate[-1].untyped_storage()._cdata)
    return separate
