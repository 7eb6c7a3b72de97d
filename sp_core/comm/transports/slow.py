"""A link that is slow on purpose, for benchmarks and tests of what hides an exchange behind computing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from torch import Tensor

from ..transport import Transport
from ..wrapping import WrappingTransport


class SlowTransport(WrappingTransport):
    """Exchanges by ``inner``, which it owns, and then waits as long as the bytes would take on a link of this kind.

    An exchange in which the busiest rank sends so many bytes takes bytes / bandwidth + latency beside what ``inner`` takes. The
    rank sleeps meanwhile, so other threads of it have the processor.
    """

    beside = True

    def __init__(self, inner: Transport, bandwidth: float, latency_s: float = 0.0) -> None:
        """
        Args:
            bandwidth: bytes a second that one rank sends; ``math.inf`` for a link that is free.
            latency_s: seconds of an exchange of nothing.

        Raises:
            ValueError: the bandwidth is not positive, or the latency negative.
        """
        if not bandwidth > 0 or latency_s < 0:
            raise ValueError(f"a link needs a bandwidth above zero and a latency of zero or more, got {bandwidth} and {latency_s}")
        super().__init__(inner)
        self.bandwidth, self.latency_s = bandwidth, latency_s
        self.name = f"slow-{inner.name}"
        self.device_type = inner.device_type
        #: seconds that exchanges took on the link, so far
        self.link_s = 0.0

    def _scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], head_counts: Sequence[int]) -> list[Tensor]:
        outputs = self.inner._scatter_heads(tensors_BtHD, token_counts, head_counts)
        B, _, H, D = tensors_BtHD[0].shape
        away = max(t * (H - h) for t, h in zip(token_counts, head_counts, strict=True))
        self._wait(len(tensors_BtHD) * B * away * D * tensors_BtHD[0].element_size())
        return outputs

    def _gather_heads(self, tensor_BThD: Tensor, token_counts: Sequence[int], head_counts: Sequence[int]) -> Tensor:
        output = self.inner._gather_heads(tensor_BThD, token_counts, head_counts)
        B, T, _, D = tensor_BThD.shape
        away = max((T - t) * h for t, h in zip(token_counts, head_counts, strict=True))
        self._wait(B * away * D * tensor_BThD.element_size())
        return output

    def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        output = self.inner._all_gather_tokens(tensor_Bt, token_counts)
        B, _, *rest = tensor_Bt.shape
        self._wait(B * max(token_counts) * (self.world_size - 1) * math.prod(rest) * tensor_Bt.element_size())
        return output

    def _wait(self, sent_bytes: int) -> None:
        """Sleeps as long as the link needs; the same on every rank."""
        seconds = sent_bytes / self.bandwidth + self.latency_s
        self.link_s += seconds
        time.sleep(seconds)
