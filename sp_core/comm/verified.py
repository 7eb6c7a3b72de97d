"""A transport that is tried again whenever what receives is larger or elsewhere than before."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .native.addresses import ALIGN
from .transport import Slots, Transport
from .trial import TRIAL_BYTES, filled_wrong, wrong_data
from .wrapping import WrappingTransport

log = logging.getLogger(__name__)


class VerifiedTransport(WrappingTransport):
    """Exchanges by ``inner``, which it owns, after known bytes have filled what the exchange lands in.

    That is done before an exchange is larger than any before it, and before the first one into slots that were made anew. If a
    byte comes back wrong on any rank, all ranks take another transport and go on with that.
    """

    def __init__(
        self, inner: Transport, group: dist.ProcessGroup | None, device: torch.device, another: Callable[[str], Transport]
    ) -> None:
        """
        Args:
            another: given why the transport in use cannot be used, makes another one that works. Collective.
        """
        super().__init__(inner)
        self._group, self._device, self._another = group, device, another
        self._holds_little = False
        self._use(inner)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    def _use(self, inner: Transport) -> None:
        self.inner = inner
        self.device_type, self.max_tensors = inner.device_type, inner.max_tensors
        # in which slots, and up to how many bytes
        self._made, self._verified = -1, 0
        if self._holds_little:
            inner.hold_little()

    def hold_little(self) -> None:
        self._holds_little = True
        self.inner.hold_little()

    def _scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], head_counts: Sequence[int]) -> list[Tensor]:
        first = tensors_BtHD[0]
        B, _, _, D = first.shape
        self._make_ready(len(tensors_BtHD), B * sum(token_counts) * max(head_counts) * D * first.element_size())
        return self.inner._scatter_heads(tensors_BtHD, token_counts, head_counts)

    def _gather_heads(self, tensor_BThD: Tensor, token_counts: Sequence[int], head_counts: Sequence[int]) -> Tensor:
        B, _, _, D = tensor_BThD.shape
        self._make_ready(1, B * max(token_counts) * sum(head_counts) * D * tensor_BThD.element_size())
        return self.inner._gather_heads(tensor_BThD, token_counts, head_counts)

    def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        B, _, *rest = tensor_Bt.shape
        self._make_ready(1, B * sum(token_counts) * math.prod(rest) * tensor_Bt.element_size())
        return self.inner._all_gather_tokens(tensor_Bt, token_counts)

    def _make_ready(self, tensors: int, output_bytes: int) -> None:
        """Before an exchange in which no rank receives more than so many tensors of ``output_bytes``; the same on every rank."""
        size = tensors * -(-output_bytes // ALIGN) * ALIGN
        # asked again after a trial, which may have come to the point where a transport makes its slots anew
        while (slots := self.inner.reserve(size)).made != self._made or size > self._verified:
            problem = self._problem(slots, size)
            if not problem:
                self._made, self._verified = slots.made, slots.size or size
                continue
            problem = f"{self.inner.name}: {problem}, in an exchange of {size / 1e6:.1f} MB"
            log.warning("the exchange cannot go on by %s", problem)
            self.inner.close()
            self._use(self._another(problem))

    def _problem(self, slots: Slots, size: int) -> str:
        if not slots.size and self._device.type != "cpu":
            # buffers that live for one exchange are not worth much memory of a device
            size = min(size, TRIAL_BYTES)
        return wrong_data(self._group, filled_wrong(self.inner, self._device, slots.size or size, slots.count))
