"""The small interface behind which every way of moving shards lives.

Shape legend: B batch, T all tokens, t this rank's tokens, H all heads, h this rank's
heads, D head_dim, C channels. ``token_counts[r]`` is rank r's t, ``head_counts[r]`` its h; where no head counts
are given they are :func:`sp_core.layout.shard_sizes` of H.

The exchange is pure data movement: every transport is bit-exact, for any element type,
any token counts, any head count (also fewer heads than ranks) and any batch.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from ..layout import shard_sizes


@dataclass
class TransportStats:
    """What one rank sent since :meth:`reset`.

    ``bytes_sent`` counts payload that left this rank (its own part stays home), by one rule for all transports: an
    all-gather counts as what a collective sends, where every shard is padded to the longest. ``seconds`` is the
    CPU's time inside calls, which on CUDA is launch time only.
    """

    exchanges: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0

    def reset(self) -> None:
        self.exchanges, self.bytes_sent, self.seconds = 0, 0, 0.0

    def count(self, bytes_sent: int, started: float) -> None:
        """Adds one exchange that began at ``started`` (of ``time.perf_counter``)."""
        self.exchanges += 1
        self.bytes_sent += bytes_sent
        self.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class Slots:
    """What receives the exchanges of a transport."""

    #: how many slots take turns
    count: int = 1
    #: bytes of each; 0 where a slot is as large as its exchange
    size: int = 0
    #: another number whenever slots were made anew, which all ranks do together
    made: int = 0


_ONE_SLOT = Slots()


class Transport(ABC):
    """Moves shards between the ranks of one group. Calls are collective and ordered.

    The public methods are the same for all transports: they say that this rank is about to wait for the others, check
    the arguments, and count what was sent. A transport writes the three moves, ``_scatter_heads``, ``_gather_heads`` and
    ``_all_gather_tokens``, which are called with arguments that fit each other and with more than one rank.

    Every exchange raises ValueError on a rank whose arguments do not fit each other.
    """

    #: short name for logs: "gloo", "nccl", "shm", "peer", ...
    name: str
    #: type of device that tensors must be on; None where any will do
    device_type: str | None = None
    #: how many tensors one exchange can carry; None where any number will do
    max_tensors: int | None = None
    #: an exchange leaves the processor, or the multiprocessors, to whoever computes at the same time. Only where that was seen
    beside: bool = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        #: several transports may count into one object
        self.stats = TransportStats()
        #: called whenever this rank is about to wait for the others; set by whoever made the transport
        self.on_enter: Callable[[], None] | None = None

    # -- for callers -----------------------------------------------------------

    def scatter_heads(
        self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], head_counts: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Token shards to head shards: each (B, t, H, D) becomes (B, T, h, D).

        All tensors share one shape and dtype (q, k and v of a self-attention); they
        travel in one operation. Outputs are contiguous, share no memory and are owned by the caller. With one rank
        a contiguous input is its own output.
        """
        self._enter()
        self._check_arguments("scatter_heads", tensors_BtHD, token_counts, token_counts[self.rank : self.rank + 1])
        if self.world_size == 1:
            return [tensor.contiguous() for tensor in tensors_BtHD]
        B, t, H, D = tensors_BtHD[0].shape
        started = time.perf_counter()
        outputs_BThD = self._scatter_heads(tensors_BtHD, token_counts, owned := self._owned("scatter_heads", H, head_counts))
        heads_of_others = H - owned[self.rank]
        head_bytes = len(tensors_BtHD) * B * D * tensors_BtHD[0].element_size()
        self.stats.count(t * heads_of_others * head_bytes, started)
        return outputs_BThD

    def gather_heads(
        self, tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int], head_counts: Sequence[int] | None = None
    ) -> Tensor:
        """Head shards back to token shards: (B, T, h, D) becomes (B, t, H, D). With one rank a contiguous input comes back itself."""
        self._enter()
        self._check_arguments("gather_heads", [tensor_BThD], token_counts, token_counts)
        B, T, h, D = tensor_BThD.shape
        owned = self._owned("gather_heads", num_heads, head_counts)
        if h != owned[self.rank]:
            self._fail(ValueError(f"rank {self.rank} owns {owned[self.rank]} of {num_heads} heads, but dim 2 has {h} (gather_heads)"))
        if self.world_size == 1:
            return tensor_BThD.contiguous()
        started = time.perf_counter()
        output_BtHD = self._gather_heads(tensor_BThD, token_counts, owned)
        tokens_of_others = T - token_counts[self.rank]
        self.stats.count(tokens_of_others * h * B * D * tensor_BThD.element_size(), started)
        return output_BtHD

    def all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        """Every rank's (B, t, ...) concatenated on dim 1, in rank order: (B, T, ...). With one rank the input itself."""
        self._enter()
        self._check_arguments("all_gather_tokens", [tensor_Bt], token_counts, token_counts[self.rank : self.rank + 1])
        if self.world_size == 1:
            return tensor_Bt
        B, _, *rest = tensor_Bt.shape
        started = time.perf_counter()
        output_BT = self._all_gather_tokens(tensor_Bt, token_counts)
        token_bytes = B * math.prod(rest) * tensor_Bt.element_size()
        self.stats.count(max(token_counts) * token_bytes * (self.world_size - 1), started)
        return output_BT

    def check(self) -> None:
        """Wait for the exchanges that were called, where calls are asynchronous, and raise if one failed."""
        self._enter()
        self._finish()

    def reserve(self, size: int) -> Slots:
        """Makes room for exchanges in which a rank receives up to ``size`` bytes, and says what receives them. Collective."""
        return _ONE_SLOT

    def after_trial(self) -> None:  # noqa: B027 (most transports are tried as they are used)
        """Called once the first exchanges were right on every rank: what holds for a trial alone ends here."""

    def hold_little(self) -> None:  # noqa: B027 (most transports hold little)
        """From now on make no room before it is needed, where that takes memory: for exchanges that are large and few."""

    def trim(self) -> None:  # noqa: B027 (most transports hold little)
        """Give back device memory that the next exchanges can take again. Collective, and only while all ranks are in step."""

    def close(self) -> None:  # noqa: B027 (most transports hold nothing)
        """Give back whatever the transport holds. Not collective; safe to call twice."""

    # -- for transports --------------------------------------------------------

    @abstractmethod
    def _scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], head_counts: Sequence[int]) -> list[Tensor]: ...

    @abstractmethod
    def _gather_heads(self, tensor_BThD: Tensor, token_counts: Sequence[int], head_counts: Sequence[int]) -> Tensor: ...

    @abstractmethod
    def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor: ...

    def _finish(self) -> None:  # noqa: B027 (most transports have waited already)
        """What :meth:`check` waits for."""

    def _fail(self, error: Exception) -> NoReturn:
        """Raises ``error``. A transport that can tell the other ranks of it does so first."""
        raise error

    def _enter(self) -> None:
        if self.on_enter is not None:
            self.on_enter()

    def _owned(self, call: str, heads: int, head_counts: Sequence[int] | None) -> tuple[int, ...]:
        """Heads of each rank, equal shares where the caller gave none."""
        if head_counts is None:
            return shard_sizes(heads, self.world_size)
        if len(head_counts) != self.world_size or sum(head_counts) != heads or min(head_counts) < 0:
            problem = f"got head counts {list(head_counts)} for {heads} heads of {self.world_size} ranks"
            self._fail(ValueError(f"rank {self.rank}: {problem} ({call})"))
        return tuple(head_counts)

    def _check_arguments(self, call: str, tensors: Sequence[Tensor], token_counts: Sequence[int], brought: Sequence[int]) -> None:
        """Whether the arguments fit each other; ``brought``: the token counts whose sum is dim 1 of each tensor."""
        first, problem = tensors[0], ""
        if len(token_counts) != self.world_size:
            problem = f"got {len(token_counts)} token counts for {self.world_size} ranks"
        elif call != "all_gather_tokens" and first.dim() != 4:
            problem = f"tensors need four dimensions (batch, tokens, heads, head_dim), got {tuple(first.shape)}"
        elif any(tensor.shape != first.shape or tensor.dtype != first.dtype for tensor in tensors):
            described = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
            problem = f"tensors of one exchange need one shape and dtype, got {described}"
        elif first.shape[1] != (expected := sum(brought)):
            problem = f"got {first.shape[1]} tokens, but was to bring {expected} of {list(token_counts)}"
        elif self.device_type is not None and any(tensor.device.type != self.device_type for tensor in tensors):
            problem = f"this transport moves {self.device_type} tensors, got one on {first.device}"
        elif self.max_tensors is not None and len(tensors) > self.max_tensors:
            problem = f"at most {self.max_tensors} tensors travel together, got {len(tensors)}"
        if problem:
            self._fail(ValueError(f"rank {self.rank}: {problem} ({call})"))
