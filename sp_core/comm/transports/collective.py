"""The plain path: torch.distributed collectives with a permute on each side.

Works with any backend that has ``all_to_all_single`` with split sizes (gloo, nccl, rccl,
xccl). Every faster transport is checked against this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...layout import shard_sizes
from ..transport import Transport

# torch 2.14 renames it and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def device_backend(backends: str) -> str:
    """What a group uses for tensors of its accelerator: the last of ``cpu:gloo,cuda:nccl``, or the only one it has."""
    return backends.split(",")[-1].split(":")[-1]


class CollectiveTransport(Transport):
    """``all_to_all_single`` / ``all_gather`` over one process group.

    Elements travel as bytes: collectives differ in the dtypes they accept (gloo has no
    fp8), data movement does not care.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, name: str | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        self.name = device_backend(dist.get_backend(group)) if name is None else name

    def _scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
        first = tensors_BtHD[0]
        n, (B, t, H, D) = len(tensors_BtHD), first.shape
        heads = shard_sizes(H, self.world_size)
        h = heads[self.rank]
        row = n * B * D * first.element_size()
        # destination-major: for rank p its heads of all tensors, (n, B, t, heads[p], D)
        parts = [torch.stack(chunks).flatten() for chunks in zip(*(x.split(heads, dim=2) for x in tensors_BtHD), strict=True)]
        received = self._all_to_all(
            torch.cat(parts), [t * count * row for count in heads], [count * h * row for count in token_counts]
        ).view(first.dtype)
        # source-major: from rank p its tokens of my heads, (n, B, token_counts[p], h, D)
        shards = received.split([n * B * count * h * D for count in token_counts])
        shards = [x.view(n, B, count, h, D) for x, count in zip(shards, token_counts, strict=True)]
        # one buffer a tensor, so that each can be kept, freed and written to without the others
        return [torch.cat([shard[index] for shard in shards], dim=1) for index in range(n)]

    def _gather_heads(self, tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int]) -> Tensor:
        B, _, h, D = tensor_BThD.shape
        heads = shard_sizes(num_heads, self.world_size)
        t = token_counts[self.rank]
        row = B * D * tensor_BThD.element_size()
        # destination-major: for rank p its tokens of my heads, (B, token_counts[p], h, D)
        parts = [x.flatten() for x in tensor_BThD.split(list(token_counts), dim=1)]
        received = self._all_to_all(
            torch.cat(parts), [count * h * row for count in token_counts], [t * count * row for count in heads]
        ).view(tensor_BThD.dtype)
        shards = received.split([B * t * count * D for count in heads])
        return torch.cat([x.view(B, t, count, D) for x, count in zip(shards, heads, strict=True)], dim=2)

    def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        mine = tensor_Bt.contiguous()
        B, t, *rest = mine.shape
        row = mine[:, :1].numel() if t else mine.new_empty((B, 1, *rest)).numel()
        size = max(token_counts) * row * mine.element_size()
        # collectives want equal sizes: pad to the longest shard, trim after
        padded = mine.new_zeros(size // mine.element_size())
        padded[: mine.numel()] = mine.flatten()
        gathered = torch.empty(self.world_size * size, dtype=torch.uint8, device=mine.device)
        _all_gather(gathered, padded.view(torch.uint8), group=self.group)
        shards = gathered.view(mine.dtype).view(self.world_size, -1)
        return torch.cat([shard[: count * row].view(B, count, *rest) for shard, count in zip(shards, token_counts, strict=True)], dim=1)

    def _all_to_all(self, send: Tensor, send_bytes: list[int], receive_bytes: list[int]) -> Tensor:
        received = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=send.device)
        dist.all_to_all_single(received, send.view(torch.uint8), receive_bytes, send_bytes, group=self.group)
        return received
