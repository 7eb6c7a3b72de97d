"""One rank's part of a block's weights, and the block's own weights in the place of which the gathered ones are put."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import SPError
from .layout import WORD, offsets, sample_places, shard_bytes
from .tensors import Apart, Rebuild, nbytes


@dataclass(eq=False)
class Place:
    """Where a module has a weight."""

    module: nn.Module
    name: str

    @property
    def weight(self) -> Tensor:
        return self._dict[self.name]  # type: ignore[return-value]

    @weight.setter
    def weight(self, value: Tensor) -> None:
        # past torch's setattr, which would check and register anew, thousands of times a forward
        self._dict[self.name] = value  # type: ignore[assignment]

    @property
    def _dict(self) -> dict[str, nn.Parameter | None] | dict[str, Tensor | None]:
        parameters = self.module._parameters
        return parameters if self.name in parameters else self.module._buffers


def places_of(block: nn.Module) -> list[Place]:
    """Every parameter and buffer of a block and of what is in it."""
    return [
        Place(module, name)
        for module in block.modules()
        for names in (module._parameters, module._buffers)
        for name, weight in names.items()
        if weight is not None
    ]


def shareable_bytes(block: nn.Module) -> int:
    """Bytes of a block's weights that can be shared out, tied ones once."""
    return sum({id(place.weight): nbytes(place.weight) for place in places_of(block)}.values())


@dataclass(frozen=True)
class _Strided:
    """One plain tensor in the bytes of a block."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def on(self, typed: dict[torch.dtype, Tensor]) -> Tensor:
        return typed[self.dtype].as_strided(self.shape, self.stride, self.offset // self.dtype.itemsize)


class BlockShard:
    """A block's weights by bytes, of which this rank holds its part.

    Args:
        number: of the block, for messages.
        weights: the places of each weight in the block, and what is to be there while the block computes.
    """

    def __init__(self, number: int, weights: Iterable[tuple[Sequence[Place], Apart]], rank: int, ranks: int, device: torch.device) -> None:
        self.number = number
        weights = list(weights)
        parts = [part for _, apart in weights for part in apart.parts]
        starts, self.block_bytes = offsets(part.numel() * part.element_size() for part in parts)
        self.shard_bytes = shard_bytes(self.block_bytes, ranks)
        self.counts = [self.shard_bytes // WORD] * ranks
        whole = torch.zeros(self.shard_bytes * ranks, dtype=torch.uint8, device=device)
        strided = [_Strided(start, part.dtype, part.shape, part.stride()) for start, part in zip(starts, parts, strict=True)]
        for place, part in zip(strided, parts, strict=True):
            if part.numel():
                place.on(_typed(whole, [part.dtype])).copy_(part)
        self._dtypes = list({part.dtype for part in parts})
        #: (places, tensors in the block's bytes, how they make the weight)
        self._weights: list[tuple[Sequence[Place], list[_Strided], Rebuild]] = []
        for places, apart in weights:
            self._weights.append((places, strided[: len(apart.parts)], apart.rebuild))
            strided = strided[len(apart.parts) :]
        self.shard = whole[rank * self.shard_bytes : (rank + 1) * self.shard_bytes].clone()
        self._sampled = torch.tensor(sample_places(self.block_bytes, ranks), dtype=torch.int64, device=device)
        self._expected = whole.view(torch.int64)[self._sampled]
        self._own: list[tuple[Place, Tensor]] = []

    def differs(self, whole: Tensor) -> Tensor:
        """Whether gathered bytes are not those that this rank shared out: a tensor, so that nobody waits for a device."""
        return (whole.view(torch.int64)[self._sampled] != self._expected).any()

    def put_in(self, whole: Tensor) -> None:
        """Put the gathered weights into the block.

        Args:
            whole: (bytes,) uint8: all ranks' shards.
        """
        typed = _typed(whole, self._dtypes)
        for places, strided, rebuild in self._weights:
            weight = rebuild([each.on(typed) for each in strided])
            for place in places:
                self._own.append((place, place.weight))
                place.weight = weight

    def take_out(self) -> None:
        """Put the block's own weights back. Safe to call at any time."""
        while self._own:
            place, weight = self._own.pop()
            place.weight = weight


def _typed(whole: Tensor, dtypes: Iterable[torch.dtype]) -> dict[torch.dtype, Tensor]:
    return {dtype: whole.view(dtype) for dtype in dtypes}


class WrongWeights(SPError):
    """Gathered weights are not those that were shared out. The picture would be wrong."""

    def __init__(self, rank: int, blocks: str) -> None:
        super().__init__(
            f"rank {rank} gathered other weights of {blocks} than it had shared out: a rank holds another model, or a link gave wrong "
            "bytes. Queue the prompt again; if this comes back, set weights of SP Model Patch to whole, and run SP Doctor"
        )
