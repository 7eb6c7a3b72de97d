"""Tiles of a shared-out VAE, each computed whole on a device of its own.

ComfyUI's own function says where the tiles lie and joins them. It asks for one tile after the other, so it runs once before on
tensors without data, which tells what it is going to ask for: then the tiles of all devices are computed at once. A tile that is
another one than was foretold, or that is left over when the others have filled all devices, is computed in bands.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

#: ComfyUI's methods that cut into tiles and join them -> what they call for each tile
METHODS = {"decode_tiled_3d": "decode", "encode_tiled_3d": "encode"}

#: where a tile begins and how long it is, in each dim
Place = tuple[tuple[int, int], ...]


class TileChannel(Protocol):
    """Where tiles go: to a :class:`.remote_vae.RemoteVae`."""

    @property
    def ranks(self) -> int: ...

    def compute_tiles(self, method: str, tiles: list[Tensor]) -> list[Tensor]: ...


class Tiles:
    """The tiles that ComfyUI is going to ask for, and the results of those that the devices have computed.

    Args:
        cut: gives the tile at a place, as ComfyUI hands it to the VAE.
    """

    def __init__(self, channel: TileChannel, method: str, places: list[Place], cut: Callable[[Place], Tensor]) -> None:
        self._channel, self._method, self._cut = channel, method, cut
        self._to_come = deque(places)
        self._ready: deque[tuple[Tensor, Tensor]] = deque()

    def result(self, x: Tensor) -> Tensor | None:
        """Of the tile ``x``; None where it has to be computed otherwise."""
        if not self._ready and len(self._to_come) >= self._channel.ranks:
            tiles = [self._cut(self._to_come.popleft()) for _ in range(self._channel.ranks)]
            self._ready.extend(zip(tiles, self._channel.compute_tiles(self._method, tiles), strict=True))
        if self._ready:
            tile, result = self._ready.popleft()
            if tile.shape == x.shape and tile.dtype == x.dtype and torch.equal(tile.to(x.device), x):
                return result
        self._ready.clear()
        self._to_come.clear()
        return None


class SpreadTiles:
    """What a shared-out VAE does otherwise; mixed in front of ComfyUI's class."""

    def decode_tiled_3d(self, samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with _spread(self, "decode_tiled_3d", samples, args, kwargs):
            return super().decode_tiled_3d(samples, *args, **kwargs)  # type: ignore[misc, no-any-return]

    def encode_tiled_3d(self, samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with _spread(self, "encode_tiled_3d", samples, args, kwargs):
            return super().encode_tiled_3d(samples, *args, **kwargs)  # type: ignore[misc, no-any-return]


def with_spread_tiles(vae: Any) -> None:
    """Have ``vae``, a shared-out VAE, spread its tiles over the devices."""
    kind = type(vae)
    # packs tell a VAE by the name of its class
    vae.__class__ = type(kind.__name__, (SpreadTiles, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


@contextmanager
def _spread(vae: Any, method: str, samples: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Inside, the stand-in of ``vae`` answers with tiles that were computed ahead."""
    members = vae.first_stage_model.__dict__
    prepare = vae.process_input if METHODS[method] == "encode" else lambda tile: tile

    def cut(place: Place) -> Tensor:
        tile = samples
        for dim, (start, length) in enumerate(place):
            tile = tile.narrow(dim, start, length)
        return prepare(tile).to(vae.vae_dtype)  # type: ignore[no-any-return]

    members["_sp_tiles"] = Tiles(members["_sp_channel"], METHODS[method], places_of_tiles(vae, method, samples, args, kwargs), cut)
    try:
        yield
    finally:
        members["_sp_tiles"] = None


def places_of_tiles(
    vae: Any, method: str, samples: Tensor, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> list[Place]:
    """Where the tiles lie for which ComfyUI's ``method`` is going to call the VAE, in the order of the calls."""
    places: list[Place] = []

    def record(tile: Tensor) -> Tensor:
        offset = int(tile.storage_offset())
        starts = ((offset // stride) % size for stride, size in zip(map(int, whole.stride()), map(int, whole.shape), strict=True))
        places.append(tuple(zip(starts, tile.shape, strict=True)))
        return torch.empty((1,) * tile.dim(), device="meta")

    whole = torch.empty(samples.shape, device="meta")
    looking = copy.copy(vae)
    looking.first_stage_model = SimpleNamespace(decode=record, encode=record)
    looking.device = looking.output_device = whole.device
    # as it is, a tile is a view, which tells where it lies
    looking.vae_dtype = whole.dtype
    looking.process_input = looking.process_output = lambda image: image
    getattr(super(SpreadTiles, looking), method)(whole, *args, **(kwargs or {}))
    return places
