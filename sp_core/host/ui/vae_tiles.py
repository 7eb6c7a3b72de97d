"""Tiles of a VAE, each computed whole on a device of its own.

ComfyUI's own function says where the tiles lie and joins them. It asks for one tile after the other, so it runs once before on
tensors without data, which tells what it is going to ask for: then the tiles of all devices are computed at once. A tile that is
another one than was foretold is computed otherwise, and so is one that is left over when the others have filled all devices,
where that can be done in bands.
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

from .. import comfy_api

#: ComfyUI's methods that cut into tiles and join them -> what they call for each tile
METHODS = {"decode_tiled_": "decode", "encode_tiled_": "encode", "decode_tiled_3d": "decode", "encode_tiled_3d": "encode"}

#: where a tile begins and how long it is, in each dim
Place = tuple[tuple[int, int], ...]


class TileChannel(Protocol):
    """Where tiles go: to a :class:`.remote_vae.RemoteVae`."""

    @property
    def ranks(self) -> int: ...

    def compute_tiles(self, method: str, tiles: list[Tensor]) -> list[Tensor] | None: ...


class Tiles:
    """The tiles that ComfyUI is going to ask for, and the results of those that the devices have computed.

    Args:
        cut: gives the tile at a place, as ComfyUI hands it to the VAE.
        in_bands: a tile that is left over is computed otherwise; else those that are left over leave devices idle.
    """

    def __init__(
        self, channel: TileChannel, method: str, places: list[Place], cut: Callable[[Place], Tensor], in_bands: bool = True
    ) -> None:
        self._channel, self._method, self._cut, self._in_bands = channel, method, cut, in_bands
        self._to_come = deque(places)
        self._ready: deque[tuple[Tensor, Tensor]] = deque()

    def result(self, x: Tensor) -> Tensor | None:
        """Of the tile ``x``; None where it has to be computed otherwise."""
        if not self._ready and self._to_come and (len(self._to_come) >= self._channel.ranks or not self._in_bands):
            count = min(len(self._to_come), self._channel.ranks)
            tiles = [self._cut(self._to_come.popleft()) for _ in range(count)]
            results = self._channel.compute_tiles(self._method, tiles)
            self._ready.extend(zip(tiles, results, strict=True) if results is not None else ())
        if self._ready:
            tile, result = self._ready.popleft()
            if tile.shape == x.shape and tile.dtype == x.dtype and torch.equal(tile.to(x.device), x):
                return result
        self._ready.clear()
        self._to_come.clear()
        return None


class SpreadTiles:
    """What a shared-out VAE does otherwise; mixed in front of ComfyUI's class."""

    def decode_tiled_(self, samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._spread("decode_tiled_", samples, args, kwargs):
            return super().decode_tiled_(samples, *args, **kwargs)  # type: ignore[misc, no-any-return]

    def encode_tiled_(self, samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._spread("encode_tiled_", samples, args, kwargs):
            return super().encode_tiled_(samples, *args, **kwargs)  # type: ignore[misc, no-any-return]

    def decode_tiled_3d(self, samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._spread("decode_tiled_3d", samples, args, kwargs):
            return super().decode_tiled_3d(samples, *args, **kwargs)  # type: ignore[misc, no-any-return]

    def encode_tiled_3d(self, samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._spread("encode_tiled_3d", samples, args, kwargs):
            return super().encode_tiled_3d(samples, *args, **kwargs)  # type: ignore[misc, no-any-return]

    @contextmanager
    def _spread(self, method: str, samples: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Inside, the stand-in answers with tiles that were computed ahead."""
        members = self.first_stage_model.__dict__  # type: ignore[attr-defined]
        places = places_of_tiles(self, method, samples, args, kwargs)
        members["_sp_tiles"] = Tiles(members["_sp_channel"], METHODS[method], places, cutter(self, method, samples))
        try:
            yield
        finally:
            members["_sp_tiles"] = None


def with_spread_tiles(vae: Any, mixin: type[SpreadTiles] = SpreadTiles) -> None:
    """Have ``vae``, a copy that is ours, spread its tiles over the devices."""
    kind = type(vae)
    # packs tell a VAE by the name of its class
    vae.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def cutter(vae: Any, method: str, samples: Tensor) -> Callable[[Place], Tensor]:
    """What gives the tile of ``samples`` at a place, as ComfyUI's ``method`` hands it to the VAE."""
    prepare = vae.process_input if METHODS[method] == "encode" else lambda tile: tile
    return lambda place: prepare(at(samples, place)).to(vae.vae_dtype)


def at(samples: Tensor, place: Place) -> Tensor:
    """The part of ``samples`` at a place."""
    for dim, (start, length) in enumerate(place):
        samples = samples.narrow(dim, start, length)
    return samples


class Places:
    """Stands for tiles that are computed: notes where in ``whole``, a tensor without data, those lie that are asked for."""

    def __init__(self, whole: Tensor) -> None:
        self._whole, self.found = whole, list[Place]()

    def result(self, tile: Tensor) -> Tensor:
        whole, offset = self._whole, int(tile.storage_offset())
        starts = ((offset // stride) % size for stride, size in zip(map(int, whole.stride()), map(int, whole.shape), strict=True))
        self.found.append(tuple(zip(starts, tile.shape, strict=True)))
        return torch.empty((1,) * tile.dim(), device="meta")


def places_of_tiles(
    vae: Any, method: str, samples: Tensor, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> list[Place]:
    """Where the tiles lie for which ComfyUI's ``method`` is going to call the VAE, in the order of the calls."""
    whole = torch.empty(samples.shape, device="meta")
    places, looking = Places(whole), copy.copy(vae)
    looking.first_stage_model = SimpleNamespace(decode=places.result, encode=places.result)
    looking.device = looking.output_device = whole.device
    # as it is, a tile is a view, which tells where it lies
    looking.vae_dtype = whole.dtype
    looking.process_input = looking.process_output = lambda image: image
    with comfy_api.without_progress():
        getattr(super(SpreadTiles, looking), method)(whole, *args, **(kwargs or {}))
    return places.found
