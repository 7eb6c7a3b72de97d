"""Device tensors by way of host memory, for devices that cannot reach each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..transport import Transport


class StagedTransport(Transport):
    """Copies to the host, exchanges there with ``inner`` (a CPU transport, which it owns), and copies back."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.world_size)
        self.inner = inner
        self.name = f"staged-{inner.name}"
        self.stats = inner.stats

    def scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
        device = tensors_BtHD[0].device
        return [x.to(device) for x in self.inner.scatter_heads([x.cpu() for x in tensors_BtHD], token_counts)]

    def gather_heads(self, tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int]) -> Tensor:
        return self.inner.gather_heads(tensor_BThD.cpu(), num_heads, token_counts).to(tensor_BThD.device)

    def all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        return self.inner.all_gather_tokens(tensor_Bt.cpu(), token_counts).to(tensor_Bt.device)

    def check(self) -> None:
        self.inner.check()

    def trim(self) -> None:
        self.inner.trim()

    def close(self) -> None:
        self.inner.close()
