"""Tiles of a shared-out VAE: what ComfyUI asks for is foretold, computed on all devices at once, and never taken for another tile."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_core.host.ui.vae_only_tiles import OnlyTiles
from sp_core.host.ui.vae_tiles import Tiles, places_of_tiles, with_spread_tiles


class Host:
    """Stands for ComfyUI's VAE: it cuts rows and columns into tiles of ``tile``, one for each member of the batch, and joins them."""

    def __init__(self, module: Any) -> None:
        self.first_stage_model = module
        self.device = self.output_device = torch.device("cpu")
        self.vae_dtype = torch.float64
        self.process_input = lambda image: 2 * image - 1
        self.process_output = lambda image: image

    def decode_tiled_3d(self, samples: Tensor, tile: int = 4) -> Tensor:
        return self._tiled(samples, tile, lambda a: self.first_stage_model.decode(a.to(self.vae_dtype).to(self.device)))

    def encode_tiled_3d(self, samples: Tensor, tile: int = 4) -> Tensor:
        return self._tiled(samples, tile, lambda a: self.first_stage_model.encode(self.process_input(a).to(self.vae_dtype).to(self.device)))

    def _tiled(self, samples: Tensor, tile: int, function: Any) -> Tensor:
        output = torch.zeros(samples.shape, device=self.output_device)
        for b, y, x in product(range(samples.size(0)), *(range(0, size, tile) for size in samples.shape[-2:])):
            part = samples[b : b + 1, ..., y : y + tile, x : x + tile]
            output[b : b + 1, ..., y : y + tile, x : x + tile].add_(function(part).to(self.output_device))
        return output


class Channel:
    """Stands for the workers, which make twice of everything."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.asked = ranks, []

    def compute_tiles(self, method: str, tiles: list[Tensor]) -> list[Tensor]:
        self.asked.append((method, len(tiles)))
        return [2 * tile for tile in tiles]


class StandIn:
    def __init__(self, ranks: int) -> None:
        self._sp_channel, self._sp_tiles, self.alone = Channel(ranks), None, 0

    def decode(self, x: Tensor) -> Tensor:
        found = self._sp_tiles.result(x) if self._sp_tiles is not None else None
        self.alone += found is None
        return 2 * x if found is None else found

    encode = decode


@pytest.mark.parametrize("method", ["decode", "encode"])
@pytest.mark.parametrize(("ranks", "asked", "alone"), [(2, 6, 0), (4, 3, 0), (5, 2, 2), (13, 0, 12)])
def test_tiles_are_computed_as_many_at_once_as_there_are_devices(method: str, ranks: int, asked: int, alone: int) -> None:
    module = StandIn(ranks)
    vae: Any = Host(module)
    # not as it lies in memory, and with tiles at the edge that are smaller
    samples = torch.randn(2, 10, 3, 7, 2).permute(0, 4, 2, 3, 1)
    expected = getattr(vae, f"{method}_tiled_3d")(samples)
    module.alone = 0
    with_spread_tiles(vae)
    assert torch.equal(getattr(vae, f"{method}_tiled_3d")(samples), expected)
    assert module._sp_channel.asked == [(method, ranks)] * asked and module.alone == alone
    assert module._sp_tiles is None and type(vae).__name__ == "Host" and isinstance(vae, Host)


class Workers(Channel):
    """What a VAE without a decode plan has of its devices."""

    def __init__(self, ranks: int, answers: bool = True) -> None:
        super().__init__(ranks)
        self.answers, self.released, self.local = answers, 0, None

    def have(self, module: Any) -> bool:
        return module is self.local

    def compute_tiles(self, method: str, tiles: list[Tensor]) -> Any:
        return super().compute_tiles(method, tiles) if self.answers else self.asked.append((method, 0))

    def release(self) -> None:
        self.released += 1


class Local:
    """A VAE's module in ComfyUI's process."""

    def __init__(self) -> None:
        self.alone = 0

    def decode(self, x: Tensor) -> Tensor:
        self.alone += 1
        return 2 * x


@pytest.mark.parametrize(
    ("rows", "answers", "asked", "alone"),
    [(7, True, [5, 1], 0), (4, True, [3], 0), (2, True, [], 1), (7, False, [0], 6)],
    ids=["one left over", "fewer than devices", "one tile", "workers that fail"],
)
def test_of_a_vae_without_a_plan_only_the_tiles_are_spread(rows: int, answers: bool, asked: list[int], alone: int) -> None:
    local, workers = Local(), Workers(5, answers)
    vae: Any = Host(local)
    samples = torch.randn(1, 3, 1, rows, 11) if rows > 2 else torch.randn(1, 3, 1, rows, 4)
    expected = vae.decode_tiled_3d(samples)
    local.alone, workers.local, vae.sp_tiles = 0, local, workers
    with_spread_tiles(vae, OnlyTiles)
    assert torch.equal(vae.decode_tiled_3d(samples), expected)
    assert [count for _, count in workers.asked] == asked and local.alone == alone
    assert vae.first_stage_model is local and workers.released == (alone != 1)
    # what a node makes a copy of, to change it, is ComfyUI's own
    workers.local = None
    copied = copy.deepcopy(vae)
    assert type(copied) is Host and not hasattr(copied, "sp_tiles")
    copied.first_stage_model.alone = vae.first_stage_model.alone = 0
    # and a module that somebody put in its place computes by itself
    vae.first_stage_model = copied.first_stage_model
    assert torch.equal(vae.decode_tiled_3d(samples), expected) and copied.first_stage_model.alone > 0


def test_where_the_tiles_lie() -> None:
    vae: Any = Host(None)
    with_spread_tiles(vae)
    places = places_of_tiles(vae, "decode_tiled_3d", torch.zeros(2, 3, 1, 5, 4))
    whole = ((0, 3), (0, 1))
    assert places == [((batch, 1), *whole, (y, height), (0, 4)) for batch in (0, 1) for y, height in ((0, 4), (4, 1))]


def test_a_tile_that_was_not_foretold_is_computed_by_itself() -> None:
    samples, channel = torch.randn(1, 1, 1, 4, 4), Channel(2)
    places = [((0, 1), (0, 1), (0, 1), (y, 1), (0, 4)) for y in range(4)]
    tiles = Tiles(channel, "decode", places, lambda place: samples.narrow(-2, *place[-2]))
    assert torch.equal(tiles.result(samples[..., :1, :]), 2 * samples[..., :1, :])  # type: ignore[arg-type]
    assert tiles.result(samples[..., 1:2, :] + 1) is None
    assert tiles.result(samples[..., 2:3, :]) is None and len(channel.asked) == 1
