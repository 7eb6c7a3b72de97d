"""ComfyUI's own VAEs, tiny, with random weights: decode and encode in one process, and the same on bands over ranks."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from distributed.longcat_ranks import enter_host
from torch import Tensor

from sp_core.demo.checkpoints import random_weights
from sp_core.demo.run import relative_l2

_WAN = {"dim": 8, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}


@dataclass(frozen=True)
class TinyVAE:
    """A class of ComfyUI and its arguments."""

    module: str
    class_name: str
    arguments: dict[str, Any]
    latent_channels: int
    #: pixels for each place of the latent, in height and width
    ratio: int
    #: (latent frames, frames of pixels) that are tried
    frames: tuple[tuple[int, int], ...] = ((1, 1), (3, 9))
    input_channels: int = 3
    weights: Callable[[Any], dict[str, Tensor]] = field(default=lambda vae: random_weights(vae, 17))

    def build(self) -> Any:
        vae = getattr(importlib.import_module(self.module), self.class_name)(**self.arguments)
        vae.load_state_dict(self.weights(vae))
        return vae.eval().requires_grad_(False)

    def inputs(self, method: str, height: int, frames: int) -> Tensor:
        channels, scale = (self.latent_channels, 1) if method == "decode" else (self.input_channels, self.ratio)
        shape = (1, channels, frames, height * scale, 3 * scale)
        return torch.randn(shape, generator=torch.Generator().manual_seed(23))


VAES: dict[str, TinyVAE] = {
    "Wan 2.1": TinyVAE("comfy.ldm.wan.vae", "WanVAE", _WAN, 4, 8),
}


def serve(comfyui: str, rank: int, world_size: int) -> Callable[..., dict[str, Any] | None]:
    """One rank: answers (VAE, method, rows of the latent, frames, ranks) with the errors of its rows."""
    import torch.distributed as dist

    enter_host(comfyui)
    from sp_core.comm import CollectiveTransport
    from sp_core.comm.point_to_point import PointToPoint
    from sp_core.layout.bands import cut_bands
    from sp_core.vae import BandEngine, RowExchange, plan_for, why_not

    groups = {size: dist.new_group(list(range(size))) for size in range(1, world_size + 1)}
    vaes: dict[str, Any] = {}

    @torch.inference_mode()
    def compared(name: str, method: str, height: int, frames: int, size: int, spoil: Callable[[], Any]) -> dict[str, Any]:
        vae = vaes.setdefault(name, VAES[name].build() if name not in vaes else None)
        plan = plan_for(vae)
        assert plan is not None and why_not(plan, vae) is None
        assert plan.ratio(vae) == VAES[name].ratio
        whole = VAES[name].inputs(method, height, frames)
        expected = getattr(vae, method)(whole)
        bands = cut_bands(height, size)
        if rank >= bands.ranks:
            return {"idle": True}
        neighbours = PointToPoint(groups[bands.ranks])
        exchange = RowExchange(neighbours, CollectiveTransport(groups[bands.ranks]))
        start, stop = bands.scaled(whole.size(-2) // height).range(rank)
        with spoil(), BandEngine(plan, bands, exchange).installed(vae):
            out = getattr(vae, method)(whole[..., start:stop, :])
        start, stop = bands.scaled(expected.size(-2) // height).range(rank)
        wanted = expected[..., start:stop, :]
        assert out.shape == wanted.shape
        at_cuts = [row for row in (0, out.size(-2) - 1)]
        return {
            "error": relative_l2(out, wanted),
            "at cuts": max(relative_l2(out[..., row, :], wanted[..., row, :]) for row in at_cuts),
            "alive": float(expected.std()),
            "messages": neighbours.stats.exchanges,
        }

    def answer(
        name: str, method: str, height: int, frames: int, size: int, spoil: Callable[[], Any] = contextlib.nullcontext
    ) -> dict[str, Any] | None:
        try:
            return compared(name, method, height, frames, size, spoil) if rank < size else None
        except Exception:
            # not raised: the ranks stay in step for the next case
            return {"failure": traceback.format_exc()}

    return answer
