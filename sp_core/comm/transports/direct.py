"""What our own transports share: arguments are checked, described for the peers, and become one kind of exchange."""

from __future__ import annotations

import hashlib
import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import ExchangeError
from ..native.addresses import Exchange, ExchangeKind
from ..native.cpu import MAX_TENSORS, CExchange
from ..transport import Transport


class Plan(NamedTuple):
    """One kind of exchange as one rank needs it; a model repeats a few of them thousands of times."""

    exchange: Exchange
    native: CExchange
    signature: bytes
    shape: tuple[int, ...]  #: of each output
    dtype: torch.dtype
    slot_bytes: int
    output_bytes: int  #: of one output
    tensor_stride: int  #: bytes from one output to the next
    sent_bytes: int  #: payload that leaves the rank


@lru_cache(maxsize=1024)
def plan_of(exchange: Exchange, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Plan:
    return Plan(
        exchange,
        CExchange.of(exchange),
        signature_of(exchange, shape, dtype),
        shape,
        dtype,
        exchange.slot_bytes(rank),
        exchange.output_bytes(rank),
        exchange.tensor_stride(rank),
        sum(exchange.sent_bytes(rank, target) for target in range(exchange.world_size) if target != rank),
    )


class ExchangeTransport(Transport):
    """A transport that writes every run of bytes straight to its final place in the peers' memory.

    Every call may raise :class:`ExchangeError` naming the rank that is late, dead, or came with another shape; after
    that the transport is done for on every rank. Nothing is ever delivered in part. Wrong arguments are a ValueError,
    after which the transport is done for as well: the other ranks have gone ahead without this one.
    """

    #: type of device that tensors must be on
    device_type: str

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._epoch = 0
        self._broken: str | None = None
        self._closed = False

    @abstractmethod
    def _move(self, plan: Plan, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs exchange number ``self._epoch``."""

    def _tell_peers(self, message: str) -> None:
        """Releases everybody who waits for this rank; ``message`` says why. Without it they time out."""

    def scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
        first = tensors_BtHD[0]
        self._check("scatter_heads", tensors_BtHD, token_counts, whole=False)
        if self.world_size == 1:
            return [tensor.contiguous() for tensor in tensors_BtHD]
        B, _, H, D = first.shape
        exchange = Exchange(ExchangeKind.SCATTER_HEADS, len(tensors_BtHD), B, H, D * first.element_size(), tuple(token_counts))
        return self._exchange(exchange, tensors_BtHD, (B, exchange.tokens, exchange.heads_of(self.rank), D))

    def gather_heads(self, tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int]) -> Tensor:
        self._check("gather_heads", [tensor_BThD], token_counts, whole=True)
        if self.world_size == 1:
            return tensor_BThD.contiguous()
        B, _, h, D = tensor_BThD.shape
        exchange = Exchange(ExchangeKind.GATHER_HEADS, 1, B, num_heads, D * tensor_BThD.element_size(), tuple(token_counts))
        if h != (mine := exchange.heads_of(self.rank)):
            self._fail(ValueError(f"rank {self.rank} owns {mine} of {num_heads} heads, but was given {h} to gather"))
        return self._exchange(exchange, [tensor_BThD], (B, token_counts[self.rank], num_heads, D))[0]

    def all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        self._check("all_gather_tokens", [tensor_Bt], token_counts, whole=False)
        if self.world_size == 1:
            return tensor_Bt
        B, _, *rest = tensor_Bt.shape
        exchange = Exchange(ExchangeKind.ALL_GATHER, 1, B, 1, math.prod(rest) * tensor_Bt.element_size(), tuple(token_counts))
        return self._exchange(exchange, [tensor_Bt], (B, exchange.tokens, *rest))[0]

    def _exchange(self, exchange: Exchange, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> list[Tensor]:
        if self._broken is not None:
            raise ExchangeError(f"rank {self.rank} cannot exchange any more: {self._broken}")
        if self._closed:
            raise ExchangeError(f"rank {self.rank} was asked to exchange after its transport was closed")
        started = time.perf_counter()
        self._epoch += 1
        sources = [rows_contiguous(tensor) for tensor in tensors]
        try:
            plan = plan_of(exchange, shape, tensors[0].dtype, self.rank)
            outputs = self._move(plan, sources)
        except BaseException as error:
            if self._broken is None:  # an interrupt in the middle: this exchange can never be completed
                self._broken = f"exchange {self._epoch} was interrupted ({error or type(error).__name__})"
                self._tell_peers(f"rank {self.rank}: {self._broken}")
            raise
        self.stats.exchanges += 1
        self.stats.bytes_sent += plan.sent_bytes
        self.stats.seconds += time.perf_counter() - started
        return outputs

    def _fail(self, error: Exception) -> NoReturn:
        """Raises ``error`` here, in every later call, and where it can on the peers."""
        if self._broken is None and not self._closed:
            self._broken = str(error)
            self._tell_peers(str(error))
        raise error

    def _check(self, call: str, tensors: Sequence[Tensor], token_counts: Sequence[int], *, whole: bool) -> None:
        """Whether the arguments fit each other; ``whole`` if the tensors hold all tokens instead of this rank's."""
        first = tensors[0]
        problem = ""
        if len(token_counts) != self.world_size:
            problem = f"got {len(token_counts)} token counts for {self.world_size} ranks"
        elif call != "all_gather_tokens" and first.dim() != 4:
            problem = f"tensors need four dimensions (batch, tokens, heads, head_dim), got {tuple(first.shape)}"
        elif any(tensor.shape != first.shape or tensor.dtype != first.dtype for tensor in tensors):
            described = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
            problem = f"tensors of one exchange need one shape and dtype, got {described}"
        elif first.shape[1] != (expected := sum(token_counts) if whole else token_counts[self.rank]):
            problem = f"got {first.shape[1]} tokens where the token counts {list(token_counts)} say {expected}"
        elif any(tensor.device.type != self.device_type for tensor in tensors):
            problem = f"this transport moves {self.device_type} tensors, got one on {first.device}"
        elif len(tensors) > MAX_TENSORS:
            problem = f"at most {MAX_TENSORS} tensors travel together, got {len(tensors)}"
        if problem:
            self._fail(ValueError(f"rank {self.rank}: {problem} ({call})"))


def signature_of(exchange: Exchange, shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """What all ranks must agree on, as a text for people; ends in a digest if it would be too long."""
    width = f"head_dim {shape[3]}" if exchange.kind is not ExchangeKind.ALL_GATHER else f"channels {list(shape[2:])}"
    text = (
        f"{exchange.kind.name.lower()} of {exchange.tensors} {str(dtype).removeprefix('torch.')} tensor(s): "
        f"batch {exchange.batch}, heads {exchange.heads}, {width}, tokens {list(exchange.token_counts)}"
    ).encode()
    return text if len(text) < 380 else text[:330] + hashlib.sha256(text).hexdigest()[:40].encode()


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself if everything behind (B, t) lies contiguous, so that a fused qkv needs no copy."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor
