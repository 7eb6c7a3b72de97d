"""A VAE without a decode plan: its tiles are spread over the devices, and all else ComfyUI's process computes as before."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import SPError
from ...pool.devices import WorkerDevice
from ...vae import architecture_of, without_plan
from ..vae_digest import vae_digest
from .recipe import Recipe
from .remote_vae import RemoteVae, Results
from .session import session
from .vae_tiles import METHODS, SpreadTiles, Tiles, cutter, places_of_tiles, with_spread_tiles
from .watch import VaeWatch

log = logging.getLogger(__name__)

#: by the number of dims of a latent beside batch and channels: of a picture and of a video
_DIMS = (2, 3)


def has_tiles(vae: Any) -> bool:
    """ComfyUI's own code cuts this VAE's frames into tiles, and its class does not."""
    is_host = (type(vae).__module__, type(vae).__qualname__) == ("comfy.sd", "VAE")
    if not is_host or vae.first_stage_model is None or getattr(vae, "handles_tiling", False):
        return False
    return vae.latent_dim in _DIMS and vae.extra_1d_channel is None


def make_tiles_vae(vae: Any, recipe: Recipe, devices: tuple[WorkerDevice, ...]) -> Any:
    """A copy of ``vae`` that has the workers compute its tiles. They load it when tiles are asked for."""
    local, source = vae.first_stage_model, vae.patcher
    results = Results(vae.output_device, vae.vae_output_dtype())
    digest = vae_digest(vae) if source.load_device.type == devices[0].kind else None
    remote = RemoteVae(
        session(), recipe, devices, without_plan(architecture_of(local)), source.model_size(), results, digest, tiles_only=True
    )
    shared = copy.copy(vae)
    shared.sp_tiles = _Workers(remote, local, VaeWatch(local, source))
    with_spread_tiles(shared, OnlyTiles)
    return shared


class OnlyTiles(SpreadTiles):
    """What such a VAE does otherwise; mixed in front of ComfyUI's class."""

    sp_tiles: _Workers
    first_stage_model: Any

    @contextmanager
    def _spread(self, method: str, samples: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Inside, the VAE's module is one that answers with tiles that were computed ahead."""
        local, workers = self.first_stage_model, self.sp_tiles
        places = places_of_tiles(self, method, samples, args, kwargs)
        if len(places) < 2 or not workers.have(local):
            yield
            return
        self.first_stage_model = _Answering(local, Tiles(workers, METHODS[method], places, cutter(self, method, samples), in_bands=False))
        try:
            yield
        finally:
            self.first_stage_model = local
        workers.release()

    def __deepcopy__(self, memo: Any) -> Any:
        """ComfyUI's VAE: what somebody changes in a copy of its own the workers do not have."""
        plain = copy.copy(self)
        del plain.sp_tiles
        plain.__class__ = type(self).__bases__[1]  # type: ignore[assignment]
        return copy.deepcopy(plain, memo)


class _Workers:
    """Computes tiles in the workers as long as they have the VAE that ComfyUI's process has; where they fail, that computes."""

    def __init__(self, remote: RemoteVae, local: torch.nn.Module, watch: VaeWatch) -> None:
        self.remote = remote
        self._local, self._watch = local, watch

    @property
    def ranks(self) -> int:
        return self.remote.ranks

    def have(self, module: Any) -> bool:
        """The workers would compute the same by ``module``."""
        try:
            self._watch.check()
        except SPError as error:
            log.info("SP: %s. ComfyUI's process computes its tiles", error)
            return False
        return module is self._local

    def compute_tiles(self, method: str, tiles: list[Tensor]) -> list[Tensor] | None:
        try:
            return self.remote.compute_tiles(method, tiles)
        except (SPError, torch.OutOfMemoryError) as error:
            log.warning("SP: %s. ComfyUI's process computes the tiles of this VAE", error)
            return None

    def release(self) -> None:
        """ComfyUI's memory management does not know of these weights, so they leave the devices when the tiles are done."""
        self.remote.release()


class _Answering:
    """The VAE's module, with tiles that were computed ahead."""

    def __init__(self, local: Any, tiles: Tiles) -> None:
        self._local, self._tiles = local, tiles

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def decode(self, x: Tensor) -> Any:
        found = self._tiles.result(x)
        return self._local.decode(x) if found is None else found

    def encode(self, x: Tensor) -> Any:
        found = self._tiles.result(x)
        return self._local.encode(x) if found is None else found
