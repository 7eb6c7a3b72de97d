"""What a model keeps of a sampling run in dictionaries that a sampler holds: keys and values of earlier frames (CausalWan).

Their numbers are the sampler's, which sets them back to overwrite frames. Their tensors lie in the workers, where each rank has
those of its own heads, so that the cache is shared out as the attention is. ComfyUI's process has tensors without memory instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import SPError


class KeptCache(dict[str, Any]):
    """One dictionary, known by its ``number`` in both processes. A tensor without memory becomes one of zeros when somebody reads it."""

    def __init__(self, number: int, values: Mapping[str, Any], device: torch.device | None = None) -> None:
        """``device``: where a worker computes; None in ComfyUI's process."""
        super().__init__(values)
        self.number, self.device = number, device
        self._first = 0

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if self.device is not None and isinstance(value, Tensor) and value.is_meta:
            value = self[name] = torch.zeros(value.shape, dtype=value.dtype, device=self.device)
        return value

    def make_room(self, tokens: int, counter: str) -> None:
        """So many tokens follow those that ``counter`` counts."""
        self._first = dict.__getitem__(self, counter)
        self[counter] = self._first + tokens

    def extended(self, name: str, new_BThD: Tensor) -> Tensor:
        """All tokens of this rank's heads up to those for which there is room, (B, first + T, h, D); ``new_BThD`` are the last of them.

        Raises:
            SPError: earlier tokens came with other heads, or the cache has no room.
        """
        kept: Tensor = dict.__getitem__(self, name)
        batch, room, _, width = kept.shape
        heads, stop = new_BThD.size(2), self._first + new_BThD.size(1)
        if kept.is_meta:
            kept = self[name] = new_BThD.new_zeros(batch, room, heads, width)
        if kept.size(2) != heads or stop > room:
            raise SPError(
                f"The cache of earlier frames has {kept.size(2)} heads and room for {room} tokens on this device, where {heads} heads and "
                f"{stop} tokens are due: the frames before were shared out in another way. Queue the prompt again"
            )
        kept[:, self._first : stop] = new_BThD
        return kept[:, :stop]

    @property
    def numbers(self) -> dict[str, Any]:
        """What both processes know of it."""
        return {name: value for name, value in self.items() if isinstance(value, (bool, int, float))}

    def as_plain(self) -> dict[str, Any]:
        """For the wire: its numbers, and the shapes and dtypes of its tensors."""
        tensors = {name: [str(x.dtype).removeprefix("torch."), *x.shape] for name, x in self.items() if isinstance(x, Tensor)}
        return {"number": self.number, "numbers": self.numbers, "tensors": tensors}


def without_memory(made: Iterable[Mapping[str, Any]], numbers: Iterator[int]) -> list[KeptCache]:
    """What a model's method made on the meta device, as caches with the next ``numbers``."""
    return [KeptCache(next(numbers), values) for values in made]


def as_plain(argument: str, caches: Iterable[Any]) -> list[dict[str, Any]]:
    """An argument that holds caches, for the wire.

    Raises:
        SPError: somebody else made them, so their tensors are in ComfyUI's process.
    """
    found = list(caches)
    if not all(isinstance(cache, KeptCache) for cache in found):
        raise SPError(f"{argument} was not made by the model's own method, so the workers do not have it. Remove SP Model Patch")
    return [cache.as_plain() for cache in found]


def take_back(caches: Iterable[KeptCache], told: Iterable[Mapping[str, Any]]) -> None:
    """In ComfyUI's process: the numbers as a forward left them."""
    for cache, numbers in zip(caches, told, strict=True):
        cache.update(numbers)


class RankCaches:
    """The caches of a sampling run, as one worker has them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, KeptCache] = {}

    def arrived(self, plain: Iterable[Mapping[str, Any]]) -> list[KeptCache]:
        """An argument as the model's method takes it: the same caches as in the forward before, with the numbers that came."""
        return [self._one(entry) for entry in plain]

    def _one(self, entry: Mapping[str, Any]) -> KeptCache:
        cache = self._known.get(entry["number"])
        if cache is None:
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, (dtype, *shape) in entry["tensors"].items()
            }
            cache = self._known[entry["number"]] = KeptCache(entry["number"], tensors, self._device)
        cache.update(entry["numbers"])
        return cache

    def forget(self) -> None:
        """A sampling run is over."""
        self._known.clear()
