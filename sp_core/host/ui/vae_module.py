"""A VAE's module as ComfyUI's process holds it: the VAE's class, whose decode and encode run in the workers.

The local module, which is never moved to a device, answers attribute reads: nodes take statistics of the latent from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...vae import DECODE_AND_ENCODE, DecodePlan
from .stand_in import StandInMixin
from .vae_tiles import Places, TileChannel, Tiles, at
from .watch import VaeWatch


class VaeChannel(TileChannel, Protocol):
    """Where a remote VAE's calls go."""

    def compute(self, method: str, x: Tensor, kwargs: dict[str, Any], output: Tensor | None = None) -> Tensor: ...


def make_stand_in_vae(local: torch.nn.Module, plan: DecodePlan, channel: VaeChannel, watch: VaeWatch) -> torch.nn.Module:
    """A stand-in for ``local``, a VAE's module, that computes through ``channel`` what ``plan`` names as its calls.

    It refuses to where ``watch`` sees that ``local`` is no longer what the workers have.
    """
    parts = {name: part for name in plan.calls if isinstance(part := getattr(local, name), torch.nn.Module)}
    members: dict[str, Any] = {name: _computed(name) for name in plan.calls if name not in parts}
    if (shape := plan.decoded_shape) is not None:
        # ComfyUI makes room for the pixels and takes none for a second copy of them, and moves no pixels to the device to encode them
        members |= {"comfy_has_chunked_io": True, "decode_output_shape": lambda self, latent: shape(self, latent)}
    # a tile that was computed ahead needs nothing of what the method would do around the call
    members |= {name: _tile_first(type(local), name) for name in DECODE_AND_ENCODE if name not in plan.calls}
    members |= {name: _cut_here(type(local), name, call) for name, call in plan.tiles.items()}
    stand_in = _stand_in(local, members, channel, watch)
    stand_in.__dict__.update({name: _stand_in(part, {"forward": _computed(name)}, channel, watch) for name, part in parts.items()})
    return stand_in


def _stand_in(local: torch.nn.Module, members: dict[str, Any], channel: VaeChannel, watch: VaeWatch) -> torch.nn.Module:
    kind = type(local)
    # packs tell a VAE by the name of its class
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    stand_in: Any = object.__new__(type(kind.__name__, (StandInMixin, kind), {**members, **named}))
    torch.nn.Module.__init__(stand_in)
    # the instance holds the channel: a class goes only when Python looks for circles, and the workers would keep the VAE until then
    stand_in.__dict__.update(
        _sp_local=local, _sp_channel=channel, _sp_watch=watch, _sp_tiles=None, _sp_backup={}, _sp_reads_more=False, training=False
    )
    return stand_in  # type: ignore[no-any-return]


def _computed(call: str) -> Callable[..., Tensor]:
    def compute(self: Any, x: Tensor, output_buffer: Tensor | None = None, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(tiles := self._sp_tiles, Places):
            return tiles.result(x)
        self._sp_watch.check()
        if tiles is not None and not kwargs and output_buffer is None and (computed := tiles.result(x)) is not None:
            return computed
        # each worker has a device of its own
        return self._sp_channel.compute(call, x, kwargs, output_buffer)

    return compute


def _tile_first(kind: type, method: str) -> Callable[..., Tensor]:
    """The class's own ``method``, but for tiles that were computed ahead."""

    def compute(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tiles: Tiles | None = self._sp_tiles
        found = None if tiles is None or args or kwargs else tiles.result(x)
        return getattr(kind, method)(self, x, *args, **kwargs) if found is None else found

    return compute


def _cut_here(kind: type, method: str, call: str) -> Callable[[Any, Tensor], Tensor]:
    """The class's own ``method``, which cuts a frame into tiles and makes ``call`` for each: the devices compute them at once."""

    def cut(self: Any, x: Tensor) -> Tensor:
        self._sp_watch.check()
        members, whole = self.__dict__, torch.empty(x.shape, device="meta")
        members["_sp_tiles"] = places = Places(whole)
        try:
            getattr(kind, method)(self, whole)
            members["_sp_tiles"] = Tiles(self._sp_channel, call, places.found, lambda place: at(x, place), in_bands=False)
            return getattr(kind, method)(self, x)  # type: ignore[no-any-return]
        finally:
            members["_sp_tiles"] = None

    return cut
