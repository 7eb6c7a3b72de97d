"""Device tensors by way of main memory, for devices that cannot reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from ..transport import Slots, Transport


class StagedTransport(Transport):
    """Copies to main memory, moves there as ``inner`` (a transport of CPU tensors, which it owns), and copies back."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.world_size)
        self.inner = inner
        self.name = f"staged-{inner.name}"
        self.max_tensors = inner.max_tensors

    def _scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
        device = tensors_BtHD[0].device
        return [x.to(device) for x in self.inner._scatter_heads([x.cpu() for x in tensors_BtHD], token_counts)]

    def _gather_heads(self, tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int]) -> Tensor:
        return self.inner._gather_heads(tensor_BThD.cpu(), num_heads, token_counts).to(tensor_BThD.device)

    def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        return self.inner._all_gather_tokens(tensor_Bt.cpu(), token_counts).to(tensor_Bt.device)

    def _finish(self) -> None:
        self.inner._finish()

    def _fail(self, error: Exception) -> NoReturn:
        self.inner._fail(error)

    def reserve(self, size: int) -> Slots:
        return self.inner.reserve(size)

    def after_trial(self) -> None:
        self.inner.after_trial()

    def trim(self) -> None:
        self.inner.trim()

    def close(self) -> None:
        self.inner.close()
