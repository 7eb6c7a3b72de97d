"""Decode and encode in a worker: this rank's band of the frame, by the VAE's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...comm.point_to_point import PointToPoint
from ...errors import SPError
from ...layout.bands import Bands, cut_bands
from ...parallel.groups import ParallelGroups
from ...pool.errors import Cancelled
from ...pool.shared_state import Phase
from ...pool.worker import WorkerContext
from ...vae import PLANS, BandEngine, DecodePlan, RowExchange, architecture_of, why_not, without_plan


@dataclass(eq=False)
class LoadedVae:
    """A VAE that the user's graph gave, and the plan of its class."""

    #: ComfyUI's comfy.sd.VAE
    vae: Any
    plan: DecodePlan
    #: a VAE takes no part in sampling runs
    run: int | None = None
    verdicts: None = None
    #: a VAE is whole on each device
    shared: Any = None

    @property
    def patcher(self) -> Any:
        return self.vae.patcher

    @property
    def module(self) -> Any:
        return self.vae.first_stage_model


@dataclass(frozen=True)
class VaeCall:
    """One call of a VAE as ComfyUI's process asks for it."""

    #: one of the plan's calls
    method: str
    #: latent or pixels, (B, C, F, H, W)
    x: Tensor
    kwargs: dict[str, Any]
    #: of the result
    dtype: torch.dtype

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> VaeCall:
        """From the body of a ``vae`` request."""
        return cls(body["method"], body["x"], body["kwargs"], body["dtype"])


def checked(found: Any, architecture: str, tiles_only: bool) -> LoadedVae:
    """The VAE that a graph gave, if it is what ComfyUI's process has. One without a plan that fits is held for its tiles.

    Raises:
        SPError: it is another one.
    """
    module: Any = getattr(found, "first_stage_model", None)
    if architecture_of(module) != architecture:
        raise SPError(f"the workers made a {architecture_of(module)} from the graph, ComfyUI's process a {architecture}")
    plan = without_plan(architecture) if tiles_only else PLANS[architecture]
    if problem := why_not(plan, module):
        raise SPError(f"The VAE of {plan.title} cannot run on several devices: {problem}. Remove SP VAE Patch to run it on one")
    return LoadedVae(found, plan)


def bands_of(loaded: LoadedVae, call: VaeCall, world_size: int) -> Bands:
    """The ranks' bands in rows of the latent; one band where the frame is no whole number of them, or cannot be cut."""
    rows, rest = divmod(call.x.size(-2), _scale(loaded, call))
    return Bands((1,)) if rest or not rows or not loaded.plan.bands else cut_bands(rows, world_size)


def activation_bytes(loaded: LoadedVae, call: VaeCall, bands: Bands, rank: int) -> float:
    """Bytes that this rank's band needs beside the weights, by ComfyUI's estimate for a frame of its size."""
    return float(_estimate(loaded, call.method)(_own_rows(loaded, call, bands, rank).shape, loaded.vae.vae_dtype))


def compute(loaded: LoadedVae, call: VaeCall, bands: Bands, groups: ParallelGroups, context: WorkerContext) -> dict[str, Any]:
    """This rank's rows of the result, and which they are. Collective over the ranks of ``groups``."""
    sequence = groups.sequence
    sequence.stats.reset()
    neighbours = PointToPoint(groups.sequence_group, sequence.stats, context.enter_collective)
    exchange = RowExchange(neighbours, sequence.all_ranks)
    engine = BandEngine(loaded.plan, bands, exchange, partial(context.enter_block, 0, 0), context.device)
    own = _own_rows(loaded, call, bands, sequence.rank).to(context.device, loaded.vae.vae_dtype)
    context.enter_block(0, 0)
    loaded.plan.before_call(loaded.module, context.device)
    run = getattr(loaded.module, call.method)
    if bands.ranks == 1:
        output = run(own, **call.kwargs)
    else:
        with engine.installed(loaded.module):
            output = run(own, **call.kwargs)
    sequence.check()
    height = output.size(-2) // bands.counts[sequence.rank] * bands.height
    start = output.size(-2) // bands.counts[sequence.rank] * bands.range(sequence.rank)[0]
    stats = {"exchange_s": sequence.stats.seconds, "exchange_bytes": sequence.stats.bytes_sent, "exchanges": sequence.stats.exchanges}
    return {"rows": output.to(call.dtype), "start": start, "height": height, "ranks": bands.ranks, "stats": stats}


def tile_bytes(loaded: LoadedVae, method: str, tile: Tensor) -> float:
    """Bytes that a whole tile needs beside the weights, by ComfyUI's estimate."""
    return float(_estimate(loaded, method)(tile.shape, loaded.vae.vae_dtype))


def compute_tile(loaded: LoadedVae, method: str, tile: Tensor, dtype: torch.dtype, context: WorkerContext) -> dict[str, Any]:
    """Decode or encode a tile by itself. Other ranks have other tiles, so each stops at a cancel for itself.

    Returns:
        The result, and whether random numbers were drawn for it: ComfyUI's process would have drawn others.

    Raises:
        Cancelled: the user cancelled.
    """

    def look(*_: Any) -> None:
        context.show(Phase.COMPUTING)
        if context.cancelled():
            raise Cancelled

    with contextlib.ExitStack() as undo:
        for module in loaded.module.modules():
            if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
                undo.callback(module.register_forward_pre_hook(look).remove)
        look()
        loaded.plan.before_call(loaded.module, context.device)
        before = _random_states(context.device)
        result = getattr(loaded.module, method)(tile.to(context.device, loaded.vae.vae_dtype)).to(dtype)
        drew = not all(map(torch.equal, before, _random_states(context.device)))
        return {"result": result, "drew": drew}


def _random_states(device: torch.device) -> list[Tensor]:
    """Of the random numbers that code on ``device`` draws."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _estimate(loaded: LoadedVae, method: str) -> Callable[..., float]:
    return loaded.vae.memory_used_decode if loaded.plan.decodes(method) else loaded.vae.memory_used_encode  # type: ignore[no-any-return]


def _scale(loaded: LoadedVae, call: VaeCall) -> int:
    """Rows that come in for each row of the latent."""
    return 1 if loaded.plan.decodes(call.method) else loaded.plan.ratio(loaded.module)


def _own_rows(loaded: LoadedVae, call: VaeCall, bands: Bands, rank: int) -> Tensor:
    if bands.ranks == 1:
        return call.x
    start, stop = bands.scaled(_scale(loaded, call)).range(rank)
    return call.x[..., start:stop, :]
