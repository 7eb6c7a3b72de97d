"""One patched MODEL, as ComfyUI's process sees its computing: sends its forwards to the workers and keeps count of them."""

from __future__ import annotations

import logging
import math
import time
import weakref
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ...errors import SPError
from ...planner.degrees import NOTHING_REQUESTED, RequestedDegrees
from ...plans import SequencePlan
from ...pool.devices import WorkerDevice
from ...pool.errors import Cancelled
from .. import comfy_api
from ..block_skips import SKIPPED, take_skips
from .known_objects import KnownObjects
from .outgoing_options import for_workers
from .progress import Watcher
from .recipe import Recipe

if TYPE_CHECKING:
    from ...pool.coordinator import Pool

log = logging.getLogger(__name__)


class WorkerSession(Protocol):
    """What a remote model asks of :class:`.session.Session`, which starts the workers and knows which models they hold."""

    def ensure(self, model: RemoteModel) -> Pool:
        """The running pool, with ``model`` loaded in every worker."""
        ...

    def running_pool(self) -> Pool | None: ...

    def holds(self, model: RemoteModel) -> bool:
        """The workers have ``model``, on their devices or in main memory."""
        ...

    def release(self, model: RemoteModel, device: torch.device | None = None) -> None:
        """Take the weights of ``model`` off the workers' devices, or off ``device`` only."""
        ...

    def finish(self, model: RemoteModel) -> None:
        """Have the workers let go of what they kept for a sampling run of ``model``."""
        ...

    def held_by(self, model: RemoteModel, patcher: Any) -> None:
        """Count ``patcher`` among the clones through which ComfyUI holds ``model``."""
        ...


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
    #: names of other packs' code that runs inside the model -> how it was computed, in a sentence
    foreign: dict[str, str] = field(default_factory=dict)


class RemoteModel:
    """Shared by all clones of one patched MODEL. Implements :class:`.proxy_module.Channel`.

    Args:
        recipe: how the workers make the model.
        session: who starts the workers and keeps the model in them.
        devices: one for each worker, by rank.
        weight_bytes: size of the model's weights.
        keep_loaded: "auto", "always" or "never", see SP Model Patch.
        known_objects: what of the options the workers have by themselves.
    """

    def __init__(
        self,
        session: WorkerSession,
        recipe: Recipe,
        devices: tuple[WorkerDevice, ...],
        plan: SequencePlan,
        weight_bytes: int,
        keep_loaded: str = "auto",
        requested: RequestedDegrees = NOTHING_REQUESTED,
        known_objects: KnownObjects | None = None,
    ) -> None:
        self.recipe, self.devices, self.plan = recipe, devices, plan
        self.weight_bytes, self.keep_loaded, self.requested = weight_bytes, keep_loaded, requested
        self.run = RunStats()
        #: bytes of weights that ComfyUI lets onto this process's device
        self.allowance = math.inf
        #: set by the session. SP Model Patch ran anew and files may have changed: the workers have to replay the graph
        self.must_replay = True
        #: cleared by the session. The workers were asked to bring the weights to the devices, and not yet to take them off
        self.on_devices = False
        #: the clones of the patched MODEL that ComfyUI still holds. Who computes through this object may outlive them for a while
        self.patchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._session = session
        self._pool_of_run: Pool | None = None
        #: number of the sampling run, by which each worker knows that another one has begun
        self._run_number: int | None = None
        self._known_objects = KnownObjects({}, foreign_code=True) if known_objects is None else known_objects

    # -- a sampling run ----------------------------------------------------------------

    def prepare(self) -> None:
        """Before sampling: start the workers if there are none, and load the model where it is not loaded."""
        self.run = RunStats()
        # ComfyUI may load the model again in the middle of a run, which does not begin another one
        self._run_number = self._run_number or time.monotonic_ns()
        self._pool_of_run = self._session.ensure(self)
        self.on_devices = True

    @property
    def resident_bytes(self) -> int:
        """Bytes that worker 0 holds on its device, as far as this process knows. Never waits."""
        return self.weight_bytes if self.on_devices and self._session.holds(self) else 0

    def finish(self) -> None:
        """After sampling, also after a failed one. Never waits for a block that a worker still computes after a cancel."""
        self._pool_of_run = self._run_number = None
        self._session.finish(self)

    def held_by(self, patcher: Any) -> None:
        """``patcher`` is one of the clones that compute through this object."""
        self._session.held_by(self, patcher)

    def release(self, device: torch.device | None = None) -> None:
        """Take the weights off the workers' devices, or off ``device`` only. The next sampling run brings them back."""
        self._session.release(self, device)

    def headroom(self, free: int, device: torch.device) -> int:
        """Bytes that activations can have on ``device`` of this process, where ``free`` bytes are free now."""
        if device.type == "cpu" or not self.shares(device):
            return free
        weights = spare = 0
        pool = self._session.running_pool()
        if pool is not None and pool.devices == self.devices:
            rank = next(rank for rank, worker in enumerate(self.devices) if worker.is_on(device))
            state = pool.shared_state.ranks[rank]
            weights, spare = state.weight_bytes, state.spare_bytes
        # After the first forward every weight that ComfyUI lets onto the device is there. Under dynamic VRAM no weight
        # has to come: weights leave the device when activations need its memory.
        all_there = bool(self.run.steps) or comfy_api.dynamic_vram()
        to_come = 0 if all_there else int(min(self.weight_bytes, self.allowance)) - weights
        return headroom_for_activations(free, spare, to_come)

    def shares(self, device: torch.device) -> bool:
        """A worker computes on ``device`` of this process."""
        return any(worker.is_on(device) for worker in self.devices)

    # -- Channel -----------------------------------------------------------------------

    def forward(self, method: str, named: dict[str, Any], extra: dict[str, Any], transformer_options: dict[str, Any]) -> Any:
        transformer_options, skips = take_skips(transformer_options)
        plain = for_workers(transformer_options, self._known_objects)
        if skips:
            plain[SKIPPED] = skips
        named, extra = ({name: self._travelling(name, value) for name, value in part.items()} for part in (named, extra))
        device = _device_of(named)
        pool = self._session.ensure(self)
        if self.plan.keeps_state and pool is not self._pool_of_run:
            raise SPError("The workers ended in the middle of sampling, with what the model keeps between steps. Queue the prompt again")
        started = time.perf_counter()
        body = {
            "key": self.recipe.key,
            "run": self._run_number,
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
        change = self.plan.to_plain.get(name)
        return value if change is None or value is None else change(value)

    def call(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        pool = self._session.ensure(self)
        body = {"key": self.recipe.key, "run": self._run_number, "method": method, "args": args, "kwargs": kwargs}
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
        for name in dict.fromkeys([*stats["apart"], *stats["whole"]]):
            calls = stats["whole"].get(name, 0)
            sentence = computed_in_full(name, calls, stats["why_whole"].get(name, "")) if calls else shared_out(name)
            if run.foreign.get(name) != sentence:
                log.info("SP: %s", sentence)
            run.foreign[name] = sentence
        if stats["decision"] != run.decision:
            log.info("SP: %s", stats["decision"])
        run.decision, run.transport = stats["decision"], stats["transport"]


def computed_in_full(name: str, calls: int, why: str = "") -> str:
    """Why a step is slower than it could be, for people."""
    reason = f" ({why})" if why else ""
    return (
        f"{name} runs inside the model and may need the whole video{reason}, so every device computes it in full, "
        f"{calls} {'call' if calls == 1 else 'calls'} a forward; remove its node for speed"
    )


def shared_out(name: str) -> str:
    """That code of another pack costs nothing but its trial, for people."""
    return f"{name} runs inside the model and keeps its parts apart, so it is shared out between the devices after its first call"


def headroom_for_activations(free: int, spare: int, to_come: int) -> int:
    """Bytes that activations can have: what is free and what the worker has in reserve, less the weights still to come."""
    return max(0, free + spare - max(0, to_come))


def _device_of(tree: Any) -> torch.device:
    """Device of the first tensor in a call's arguments that holds data: where the result belongs."""
    devices = (leaf.device for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return next((device for device in devices if device.type != "meta"), torch.device("meta"))
