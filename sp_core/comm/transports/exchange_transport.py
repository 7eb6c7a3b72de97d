"""What our own transports share: an exchange is described for the peers, prepared once, and done as a whole or not at all."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ...layout import shard_sizes
from ..errors import ExchangeError
from ..native.addresses import Exchange, ExchangeKind
from ..native.cpu import MAX_TENSORS, CExchange
from ..transport import Transport


class PreparedExchange(NamedTuple):
    """One kind of exchange as one rank needs it; a model repeats a few of them thousands of times."""

    exchange: Exchange
    native: CExchange
    signature: bytes
    shape: tuple[int, ...]  #: of each output
    dtype: torch.dtype
    slot_bytes: int
    largest_slot: int  #: bytes that the rank with the most receives
    output_bytes: int  #: of one output
    tensor_stride: int  #: bytes from one output to the next


@lru_cache(maxsize=1024)
def prepared(exchange: Exchange, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> PreparedExchange:
    return PreparedExchange(
        exchange,
        CExchange.of(exchange),
        signature_of(exchange, shape, dtype),
        shape,
        dtype,
        exchange.slot_bytes(rank),
        max(exchange.slot_bytes(other) for other in range(exchange.world_size)),
        exchange.output_bytes(rank),
        exchange.tensor_stride(rank),
    )


class ExchangeTransport(Transport):
    """A transport that writes every run of bytes straight to its final place in the peers' memory.

    Every call may raise :class:`ExchangeError` naming the rank that is late, dead, or came with another shape; after
    that the transport is broken on every rank. Nothing is ever delivered in part. Wrong arguments are a ValueError,
    after which the transport is broken as well: the other ranks have gone ahead without this one.
    """

    max_tensors = MAX_TENSORS

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._epoch = 0
        self._broken: str | None = None
        self._closed = False

    @abstractmethod
    def _move(self, prepared: PreparedExchange, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs exchange number ``self._epoch``."""

    def _tell_peers(self, message: str) -> None:
        """Releases everybody who waits for this rank; ``message`` says why. Without it they time out."""

    def _scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], head_counts: Sequence[int]) -> list[Tensor]:
        first = tensors_BtHD[0]
        B, _, H, D = first.shape
        n, head_bytes = len(tensors_BtHD), D * first.element_size()
        exchange = Exchange(ExchangeKind.SCATTER_HEADS, n, B, H, head_bytes, tuple(token_counts), tuple(head_counts))
        return self._exchange(exchange, tensors_BtHD, (B, exchange.tokens, exchange.heads_of(self.rank), D))

    def _gather_heads(self, tensor_BThD: Tensor, token_counts: Sequence[int], head_counts: Sequence[int]) -> Tensor:
        (B, _, _, D), num_heads = tensor_BThD.shape, sum(head_counts)
        head_bytes = D * tensor_BThD.element_size()
        exchange = Exchange(ExchangeKind.GATHER_HEADS, 1, B, num_heads, head_bytes, tuple(token_counts), tuple(head_counts))
        return self._exchange(exchange, [tensor_BThD], (B, token_counts[self.rank], num_heads, D))[0]

    def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        B, _, *rest = tensor_Bt.shape
        exchange = Exchange(ExchangeKind.ALL_GATHER, 1, B, 1, math.prod(rest) * tensor_Bt.element_size(), tuple(token_counts))
        return self._exchange(exchange, [tensor_Bt], (B, exchange.tokens, *rest))[0]

    def _exchange(self, exchange: Exchange, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> list[Tensor]:
        if self._broken is not None:
            raise ExchangeError(f"rank {self.rank} cannot exchange any more: {self._broken}")
        if self._closed:
            raise ExchangeError(f"rank {self.rank} was asked to exchange after its transport was closed")
        self._epoch += 1
        sources = [rows_contiguous(tensor) for tensor in tensors]
        try:
            return self._move(prepared(exchange, shape, tensors[0].dtype, self.rank), sources)
        except BaseException as error:
            if self._broken is None:  # an interrupt in the middle: this exchange can never be completed
                self._broken = f"exchange {self._epoch} was interrupted ({error or type(error).__name__})"
                self._tell_peers(f"rank {self.rank}: {self._broken}")
            raise

    def _fail(self, error: Exception) -> NoReturn:
        """Raises ``error`` here, in every later call, and where it can on the peers."""
        if self._broken is None and not self._closed:
            self._broken = str(error)
            self._tell_peers(str(error))
        raise error


def signature_of(exchange: Exchange, shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """What all ranks must agree on, as a text for people; ends in a digest if it would be too long."""
    width = f"head_dim {shape[3]}" if exchange.kind is not ExchangeKind.ALL_GATHER else f"channels {list(shape[2:])}"
    # ranks with other shares of the heads do not mean the same exchange either
    shared = "" if exchange.head_counts == shard_sizes(exchange.heads, exchange.world_size) else f" as {list(exchange.head_counts)}"
    text = (
        f"{exchange.kind.name.lower()} of {exchange.tensors} {str(dtype).removeprefix('torch.')} tensor(s): "
        f"batch {exchange.batch}, heads {exchange.heads}{shared}, {width}, tokens {list(exchange.token_counts)}"
    ).encode()
    return text if len(text) < 380 else text[:330] + hashlib.sha256(text).hexdigest()[:40].encode()


def other_exchange(epoch: int, rank: int, signature: bytes, culprit: int, its_signature: bytes) -> ExchangeError:
    """The error of ranks that do not mean the same exchange: ``culprit`` came with another one than ``rank``."""
    return ExchangeError(
        f"rank {culprit} came to exchange {epoch} with {its_signature.decode(errors='replace')}, but rank {rank} with "
        f"{signature.decode(errors='replace')}; all ranks must run the same model on the same input",
        culprit,
    )


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself if everything behind (B, t) lies contiguous, so that a fused qkv needs no copy."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor
