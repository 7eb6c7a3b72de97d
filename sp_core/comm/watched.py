"""A transport that says, before each exchange, that its rank is about to wait for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .transport import Transport, TransportStats


class WatchedTransport(Transport):
    """``inner``, with ``enter_collective`` called whenever an exchange is entered."""

    def __init__(self, inner: Transport, enter_collective: Callable[[], None]) -> None:
        self.inner, self._meet = inner, enter_collective
        super().__init__(inner.rank, inner.world_size)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def stats(self) -> TransportStats:
        return self.inner.stats

    @stats.setter
    def stats(self, stats: TransportStats) -> None:
        self.inner.stats = stats

    def scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
        self._meet()
        return self.inner.scatter_heads(tensors_BtHD, token_counts)

    def gather_heads(self, tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int]) -> Tensor:
        self._meet()
        return self.inner.gather_heads(tensor_BThD, num_heads, token_counts)

    def all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        self._meet()
        return self.inner.all_gather_tokens(tensor_Bt, token_counts)

    def check(self) -> None:
        self._meet()
        self.inner.check()

    def trim(self) -> None:
        self.inner.trim()

    def close(self) -> None:
        self.inner.close()
