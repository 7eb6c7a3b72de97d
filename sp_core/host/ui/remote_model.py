"""One MODEL's line to the workers: makes sure they hold it, and sends its calls."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...errors import SPError
from ...planner.degrees import NOTHING_REQUESTED, RequestedDegrees
from ...plans import SequencePlan
from ...pool.devices import WorkerDevice
from ...pool.errors import Cancelled
from .. import comfy_api
from ..options import for_workers
from ..patches import SKIPPED, take_skips
from .progress import Watcher
from .recipe import Recipe

if TYPE_CHECKING:
    from ...pool.coordinator import Pool

log = logging.getLogger(__name__)

#: what a message says the workers are doing
RELEASING = "taking weights off the devices"


@dataclass
class RunStats:
    """One sampling run, as SP Sampler reports it."""

    steps: list[float] = field(default_factory=list)
    exchange_s: float = 0.0
    exchange_bytes: int = 0
    exchanges: int = 0
    sent_bytes: int = 0
    reused_bytes: int = 0
    decision: str = ""
    transport: str = ""


class RemoteModel:
    """Shared by all clones of one patched MODEL. Implements :class:`.remote.Channel`."""

    def __init__(
        self,
        recipe: Recipe,
        devices: tuple[WorkerDevice, ...],
        plan: SequencePlan,
        weight_bytes: int,
        keep_loaded: str = "auto",
        requested: RequestedDegrees = NOTHING_REQUESTED,
    ) -> None:
        self.recipe, self.devices, self.plan = recipe, devices, plan
        self.weight_bytes, self.keep_loaded, self.requested = weight_bytes, keep_loaded, requested
        self.run = RunStats()
        self._on_devices = False
        #: bytes of weights that the host lets onto its device
        self.allowance = math.inf
        self._pool_of_run: Pool | None = None
        #: the node that made this object ran the graph anew: files may have changed, so the workers look again
        self.fresh = True
        self._told: set[str] = set()

    # -- a sampling run ----------------------------------------------------------------

    def prepare(self) -> None:
        """Before sampling: workers up, model there."""
        self.run = RunStats()
        self._pool_of_run = self._session().ensure(self)
        self._on_devices = True

    @property
    def resident_bytes(self) -> int:
        """Bytes that worker 0 holds on its device, as far as this process knows. Never waits."""
        return self.weight_bytes if self._on_devices and self._session().holds(self) else 0

    def finish(self) -> None:
        """After sampling, also after a failed one. Never waits for a block that is still under way after a cancel."""
        self._pool_of_run = None
        pool = self._session().running_pool()
        if pool is not None:
            pool.forget_sent()
            pool.afterwards("finish", {"key": self.recipe.key, "method": self.plan.after_run}, "clearing up after sampling")
            if self.keep_loaded == "never":
                self._on_devices = False
                pool.afterwards("release", partial(self.release_body, pool), RELEASING)

    def release(self, device: torch.device | None = None) -> None:
        """Weights off the devices, or off this one only, for the moment; the next sampling brings them back."""
        self._on_devices = False
        self._session().release(self, device)

    def release_body(self, pool: Pool, device: torch.device | None = None) -> dict[str, Any]:
        """What the workers need to know to let go of weights, as things stand when they are asked."""
        ranks = [rank for rank, worker in enumerate(pool.devices) if device is None or worker.is_on(device)]
        return {"key": self.recipe.key, "ranks": ranks, "wholly": device is None, "reset": pool.out_of_step}

    def room(self, free: int, device: torch.device) -> int:
        """Bytes for activations on ``device`` of this process, of which ``free`` are free now."""
        if device.type == "cpu" or not self.shares(device):
            return free
        weights = spare = 0
        pool = self._session().running_pool()
        if pool is not None and pool.devices == self.devices:
            rank = next(rank for rank, worker in enumerate(self.devices) if worker.is_on(device))
            state = pool.shared_state.ranks[rank]
            weights, spare = state.weight_bytes, state.spare_bytes
        # behind the first forward all weights are there that the host lets in; under dynamic VRAM they make way
        there = bool(self.run.steps) or comfy_api.dynamic_vram()
        return room_for_activations(free, spare, 0 if there else int(min(self.weight_bytes, self.allowance)) - weights)

    def shares(self, device: torch.device) -> bool:
        """A worker computes on ``device`` of this process."""
        return any(worker.is_on(device) for worker in self.devices)

    def _session(self) -> Any:
        from .session import session

        return session()

    # -- Channel -----------------------------------------------------------------------

    def forward(self, method: str, named: dict[str, Any], extra: dict[str, Any], transformer_options: dict[str, Any]) -> Any:
        transformer_options, skips = take_skips(transformer_options)
        plain, kept_here = for_workers(transformer_options)
        if skips:
            plain[SKIPPED] = skips
        named, extra = ({name: self._travelling(name, value) for name, value in part.items()} for part in (named, extra))
        for key in kept_here:
            if key not in self._told:
                self._told.add(key)
                log.info("transformer_options['%s'] is an object and stays in this process", key)
        device = _device_of(named)
        pool = self._session().ensure(self)
        if self.plan.keeps_state and pool is not self._pool_of_run:
            raise SPError("The workers ended in the middle of sampling, with what the model keeps between steps. Queue the prompt again")
        started = time.perf_counter()
        body = {
            "key": self.recipe.key,
            "method": method,
            "named": named,
            "extra": extra,
            "options": plain,
            "requested": asdict(self.requested),
            "reset": pool.out_of_step,
        }
        reply = self._call(pool, "forward", body, device)
        pool.out_of_step = False
        self._account(pool, reply["stats"], time.perf_counter() - started)
        return reply["output"]

    def _travelling(self, name: str, value: Any) -> Any:
        change = self.plan.travels.get(name)
        return value if change is None or value is None else change(value)

    def call(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        pool = self._session().ensure(self)
        body = {"key": self.recipe.key, "method": method, "args": args, "kwargs": kwargs}
        return self._call(pool, "call", body, _device_of(args))

    def _call(self, pool: Pool, operation: str, body: dict[str, Any], device: torch.device) -> Any:
        try:
            return pool.call(
                operation,
                body,
                device=device,
                doing=f"computing a step of {self.plan.architecture}",
                watch=Watcher(f"{self.plan.architecture} step"),
                volatile=("named.x", "named.timestep"),
            )
        except Cancelled:
            comfy_api.raise_interrupt()

    def _account(self, pool: Pool, stats: dict[str, Any], seconds: float) -> None:
        run = self.run
        run.steps.append(seconds)
        run.exchange_s += stats["exchange_s"]
        run.exchange_bytes += stats["exchange_bytes"]
        run.exchanges += stats["exchanges"]
        run.sent_bytes += pool.last_call.bytes_sent
        run.reused_bytes += pool.last_call.bytes_reused
        if stats["decision"] != run.decision:
            log.info("SP: %s", stats["decision"])
        run.decision, run.transport = stats["decision"], stats["transport"]


def room_for_activations(free: int, spare: int, to_come: int) -> int:
    """Bytes that activations can have: what is free and what the worker has in reserve, less the weights still to come."""
    return max(0, free + spare - max(0, to_come))


def _device_of(tree: Any) -> torch.device:
    """Device of the first tensor in a call's arguments: where its result belongs."""
    if isinstance(tree, torch.Tensor):
        return tree.device
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    for value in values:
        device = _device_of(value)
        if device.type != "meta":
            return device
    return torch.device("meta")
