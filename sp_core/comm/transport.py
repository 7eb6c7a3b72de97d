"""The small interface behind which every way of moving shards lives.

Shape legend: B batch, T all tokens, t this rank's tokens, H all heads, h this rank's
heads, D head_dim, C channels. ``token_counts[r]`` is rank r's t; head ranges follow
:func:`sp_core.layout.shard_sizes` of H.

The exchange is pure data movement: every transport is bit-exact, for any element type,
any token counts, any head count (also fewer heads than ranks) and any batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

#: seconds that a rank waits for the others; compiling or loading a model may well take minutes
DEFAULT_TIMEOUT_S = 600.0


@dataclass
class TransportStats:
    """What one rank sent since :meth:`reset`.

    ``bytes_sent`` counts payload that left this rank (its own part stays home);
    ``seconds`` is host time inside calls, which on CUDA is launch time only.
    """

    exchanges: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0

    def reset(self) -> None:
        self.exchanges, self.bytes_sent, self.seconds = 0, 0, 0.0


class Transport(ABC):
    """Moves shards between the ranks of one group. Calls are collective and ordered."""

    #: short name for logs: "gloo", "nccl", "shm", "peer", ...
    name: str

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.stats = TransportStats()

    @abstractmethod
    def scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
        """Token shards to head shards: each (B, t, H, D) becomes (B, T, h, D).

        All tensors share one shape and dtype (q, k and v of a self-attention); they
        travel in one operation. Outputs are contiguous and owned by the caller.
        """

    @abstractmethod
    def gather_heads(self, tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int]) -> Tensor:
        """Head shards back to token shards: (B, T, h, D) becomes (B, t, H, D)."""

    @abstractmethod
    def all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        """Every rank's (B, t, ...) concatenated on dim 1, in rank order: (B, T, ...)."""

    def check(self) -> None:  # noqa: B027 (most transports have waited already)
        """Wait for the exchanges that were called, where calls are asynchronous, and raise if one failed."""

    def trim(self) -> None:  # noqa: B027 (most transports hold little)
        """Give back device memory that the next exchanges can take again. Collective, and only while all ranks are in step."""

    def close(self) -> None:  # noqa: B027 (most transports hold nothing)
        """Give back whatever the transport holds. Not collective; safe to call twice."""
