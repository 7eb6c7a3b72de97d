"""Device tensors by way of main memory, for devices that cannot reach each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..transport import Transport
from ..wrapping import WrappingTransport


class StagedTransport(WrappingTransport):
    """Copies to main memory, moves there as ``inner`` (a transport of CPU tensors, which it owns), and copies back."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.name = f"staged-{inner.name}"

    def _scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], head_counts: Sequence[int]) -> list[Tensor]:
        device = tensors_BtHD[0].device
        return [x.to(device) for x in self.inner._scatter_heads([x.cpu() for x in tensors_BtHD], token_counts, head_counts)]

    def _gather_heads(self, tensor_BThD: Tensor, token_counts: Sequence[int], head_counts: Sequence[int]) -> Tensor:
        return self.inner._gather_heads(tensor_BThD.cpu(), token_counts, head_counts).to(tensor_BThD.device)

    def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        return self.inner._all_gather_tokens(tensor_Bt.cpu(), token_counts).to(tensor_Bt.device)
