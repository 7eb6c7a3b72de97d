"""The plain path: torch.distributed collectives, with a permuted copy on the one side that needs it.

Works with any backend that has ``all_to_all_single`` with split sizes (gloo, nccl, rccl,
xccl). Every faster transport falls back on this one.

A row (t, H, D) of a batch is packed by destination and arrives where it stays, as the shards of a head follow each other in
rank order. On the way back a row (T, h, D) is by destination already, and is unpacked once. So q, k, v and the output are
copied four times in all, and one packed tensor at a time is in memory beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..transport import Transport

# torch 2.14 renames it and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: bytes of q, k and v of all ranks; below this, to call a collective once costs less than to copy once
_TOGETHER_BELOW = 8 << 20


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

    def _scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], head_counts: Sequence[int]) -> list[Tensor]:
        B, _, H, D = tensors_BtHD[0].shape
        T, heads = sum(token_counts), head_counts
        if len(tensors_BtHD) * B > 1 and len(tensors_BtHD) * B * T * H * D * tensors_BtHD[0].element_size() < _TOGETHER_BELOW:
            return self._scatter_together(tensors_BtHD, token_counts, heads)
        received = [heads[self.rank] * D * count for count in token_counts]
        outputs_BThD = [x.new_empty(B, T, heads[self.rank], D) for x in tensors_BtHD]
        for x_BtHD, output_BThD in zip(tensors_BtHD, outputs_BThD, strict=True):
            for x_tHD, output_ThD in zip(x_BtHD, output_BThD, strict=True):
                self._all_to_all(output_ThD.view(-1), *_packed(x_tHD, heads), received)
        return outputs_BThD

    def _scatter_together(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], heads: Sequence[int]) -> list[Tensor]:
        """In one collective, where its latency is what counts: what comes from a rank is of all tensors, and is sorted here."""
        first = tensors_BtHD[0]
        n, (B, t, _, D), h = len(tensors_BtHD), first.shape, heads[self.rank]
        sizes, received = [n * B * t * count * D for count in heads], [n * B * count * h * D for count in token_counts]
        send, got = first.new_empty(sum(sizes)), first.new_empty(sum(received))
        shards = [part.view(n, B, t, count, D) for part, count in zip(send.split(sizes), heads, strict=True)]
        for index, x_BtHD in enumerate(tensors_BtHD):
            for shard, part in zip(shards, x_BtHD.split(list(heads), dim=2), strict=True):
                shard[index].copy_(part)
        self._all_to_all(got, send, sizes, received)
        shards = [part.view(n, B, count, h, D) for part, count in zip(got.split(received), token_counts, strict=True)]
        # one buffer a tensor, so that each can be kept, freed and written to without the others
        return [torch.cat([shard[index] for shard in shards], dim=1) for index in range(n)]

    def _gather_heads(self, tensor_BThD: Tensor, token_counts: Sequence[int], head_counts: Sequence[int]) -> Tensor:
        B, _, h, D = tensor_BThD.shape
        num_heads, t = sum(head_counts), token_counts[self.rank]
        sizes, received = [count * h * D for count in token_counts], [t * count * D for count in head_counts]
        output_BtHD = tensor_BThD.new_empty(B, t, num_heads, D)
        for x_ThD, output_tHD in zip(tensor_BThD.contiguous(), output_BtHD, strict=True):
            shards = x_ThD.new_empty(t * num_heads * D)
            self._all_to_all(shards, x_ThD.view(-1), sizes, received)
            for shard, target in zip(shards.split(received), output_tHD.split(list(head_counts), dim=1), strict=True):
                target.copy_(shard.view(target.shape))
        return output_BtHD

    def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        mine, longest = tensor_Bt.contiguous(), max(token_counts)
        B, t, *rest = mine.shape
        # collectives want equal sizes: as long as the longest shard, trim after
        row = mine.new_empty((B, 1, *rest)).numel()
        if t < longest:
            padded = mine.new_empty(longest * row)
            padded[: mine.numel()] = mine.flatten()
            mine = padded
        gathered = mine.new_empty(self.world_size * longest * row)
        _all_gather(_bytes(gathered), _bytes(mine.view(-1)), group=self.group)
        if B == 1 and min(token_counts) == longest:
            return gathered.view(B, sum(token_counts), *rest)
        shards = gathered.view(self.world_size, -1)
        return torch.cat([shard[: count * row].view(B, count, *rest) for shard, count in zip(shards, token_counts, strict=True)], dim=1)

    def _all_to_all(self, output: Tensor, send: Tensor, sizes: Sequence[int], received: Sequence[int]) -> None:
        """Flat tensors; ``sizes`` and ``received``: elements to and from each rank."""
        width = send.element_size()
        dist.all_to_all_single(
            _bytes(output), _bytes(send), [size * width for size in received], [size * width for size in sizes], group=self.group
        )


def _packed(x_tHD: Tensor, heads: Sequence[int]) -> tuple[Tensor, list[int]]:
    """A copy of all shards of dim 1, one after the other and each contiguous, as a flat tensor; and their elements."""
    parts = x_tHD.split(list(heads), dim=1)
    sizes = [part.numel() for part in parts]
    packed = x_tHD.new_empty(x_tHD.numel())
    for part, target in zip(parts, packed.split(sizes), strict=True):
        target.view(part.shape).copy_(part)
    return packed, sizes


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)
