"""One shared-out VAE, as ComfyUI's process sees its computing: decodes and encodes in the workers, and puts the bands together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...pool.coordinator import CallStats
from ...pool.devices import WorkerDevice
from ...pool.errors import WorkerFailed
from ...vae import DecodePlan
from ..vae_digest import Digest
from .progress import Watcher
from .recipe import Recipe
from .remote_model import RemoteModel, WorkerSession, asking
from .report import size

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Results:
    """Where ComfyUI wants decoded pixels and encoded latents."""

    device: torch.device
    dtype: torch.dtype


class RemoteVae(RemoteModel):
    """Computes for a VAE whose code ComfyUI's process keeps. The session holds it as it holds a diffusion model.

    Args:
        results: where its results belong.
        digest: what the VAE is in ComfyUI's process; None where a worker's may be another one.
        tiles_only: the workers compute whole tiles, whatever decode plan its class has.
    """

    is_vae = True

    def __init__(
        self,
        session: WorkerSession,
        recipe: Recipe,
        devices: tuple[WorkerDevice, ...],
        plan: DecodePlan,
        weight_bytes: int,
        results: Results,
        digest: Digest | None = None,
        tiles_only: bool = False,
    ) -> None:
        # the session and the status page ask a decode plan for what they ask of a sequence plan
        super().__init__(session, recipe, devices, plan, weight_bytes)  # type: ignore[arg-type]
        self.digest, self.tiles_only = digest, tiles_only
        self._results, self._title, self._decodes = results, plan.title, plan.decodes
        self._draws = False

    def compute(self, method: str, x: Tensor, kwargs: dict[str, Any], output: Tensor | None = None) -> Tensor:
        """Decode or encode (B, C, F, H, W), in ComfyUI's device and dtype for results.

        Args:
            method: one of the plan's calls.
            output: where the result goes, if somebody has made room for it.

        Raises:
            OutOfMemoryError: a device has too little memory; ComfyUI goes on with tiles.
            SPError: anything else went wrong in the workers.
        """
        joined = _Joined(self._results, output)
        cost = self._ask("vae", method, {"x": x, "kwargs": kwargs}, "x", joined.take)
        decision = f"{method}: {joined.ranks} of {self.ranks} devices, each a band of the frame"
        self._count(joined.stats, cost, decision)
        log.info("SP: %s", _line(self._title, decision, cost[0], joined.stats, self.weight_bytes))
        assert joined.whole is not None
        return joined.whole

    @property
    def ranks(self) -> int:
        return len(self.devices)

    def compute_tiles(self, method: str, tiles: list[Tensor]) -> list[Tensor] | None:
        """Decode or encode one tile on each device, in ComfyUI's device and dtype for results. Raises as :meth:`compute` does.

        Args:
            method: of the VAE, one of the plan's calls or not.
            tiles: at most as many as there are devices; shapes may differ.

        Returns:
            A result for each tile; None where the VAE draws random numbers, which ComfyUI's process has to draw.
        """
        if self._draws:
            return None
        results: dict[int, dict[str, Any]] = {}

        def take(rank: int, value: dict[str, Any] | None) -> None:
            if value is not None:
                # the value is a view of a buffer that the next request writes
                results[rank] = {**value, "result": value["result"].to(self._results.device, self._results.dtype, copy=True)}

        cost = self._ask("tiles", method, {"tiles": tiles}, "tiles", take)
        no_exchange = {"exchange_s": 0.0, "exchange_bytes": 0, "exchanges": 0}
        self._count(no_exchange, cost, f"{method}: {len(tiles)} of {self.ranks} devices, each a tile of its own")
        self._draws = any(value["drew"] for value in results.values())
        if self._draws:
            log.info(
                "SP: the VAE of %s draws random numbers, which ComfyUI's process has to draw; its tiles go one after the other", self._title
            )
            return None
        return [results[rank]["result"] for rank in range(len(tiles))]

    def _ask(
        self, operation: str, method: str, what: dict[str, Any], volatile: str, take: Callable[[int, Any], None]
    ) -> tuple[float, CallStats]:
        """Have the workers compute; returns seconds, and what was sent."""
        pool = self._session.ensure(self)
        started = time.perf_counter()
        body = {"key": self.recipe.key, "method": method, **what, "dtype": self._results.dtype, "reset": pool.out_of_step}
        doing = f"{'decoding' if self._decodes(method) else 'encoding'} with the VAE of {self._title}"
        with asking(self._session):
            try:
                pool.call(operation, body, doing=doing, watch=Watcher(doing), volatile=(volatile,), each=take)
            except WorkerFailed as error:
                if error.kind == torch.OutOfMemoryError.__name__:
                    raise torch.OutOfMemoryError(str(error)) from error
                raise
        pool.out_of_step = False
        return time.perf_counter() - started, pool.last_call

    def _count(self, told: dict[str, Any], cost: tuple[float, CallStats], decision: str) -> None:
        self.stats.count(told, *cost)
        self.stats.decision = decision


def _line(title: str, decision: str, seconds: float, told: dict[str, Any], weight_bytes: int) -> str:
    """What a decode or encode cost, and what becomes of the VAE's weights, for a person."""
    exchanged = f"exchanges: {told['exchanges']}, {size(told['exchange_bytes'])} sent by rank 0"
    weights = f"Its weights ({size(weight_bytes)}) stay on the devices until ComfyUI needs the memory"
    return f"VAE of {title}, {decision}, in {seconds:.2f} s; {exchanged}. {weights}"


class _Joined:
    """The result while the ranks' bands arrive: each goes to its rows at once."""

    def __init__(self, results: Results, output: Tensor | None) -> None:
        self._results = results
        self.whole = output
        self.stats: dict[str, Any] = {}
        self.ranks = 0

    def take(self, rank: int, value: dict[str, Any] | None) -> None:
        if value is None:
            return
        rows, start = value["rows"], value["start"]
        if self.whole is None:
            shape = (*rows.shape[:-2], value["height"], rows.size(-1))
            self.whole = torch.empty(shape, dtype=self._results.dtype, device=self._results.device)
        if not self.ranks:
            self.stats, self.ranks = value["stats"], value["ranks"]
        self.whole[..., start : start + rows.size(-2), :].copy_(rows)
