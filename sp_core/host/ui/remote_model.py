"""One patched MODEL, as ComfyUI's process sees its computing: sends its forwards to the workers and keeps count of them."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ...errors import SPError
from ...planner.degrees import NOTHING_REQUESTED, RequestedDegrees
from ...plans import SequencePlan, kept_cache
from ...pool.devices import WorkerDevice
from ...pool.errors import Cancelled
from .. import comfy_api
from ..block_skips import SKIPPED, take_skips
from ..travel import from_wire, to_wire
from ..vae_digest import Digest
from .departure import Departure
from .known_objects import KnownObjects
from .one_copy import share_memory
from .outgoing_options import OutgoingOptions
from .progress import Watcher
from .recipe import Recipe

if TYPE_CHECKING:
    from ...pool.coordinator import CallStats, Pool

log = logging.getLogger(__name__)


class WorkerSession(Protocol):
    """What a remote model asks of :class:`.session.Session`, which starts the workers and knows which models they hold."""

    def ensure(self, model: RemoteModel) -> Pool:
        """The pool of the model's devices, with ``model`` loaded in every worker."""
        ...

    def running_pool(self, model: RemoteModel) -> Pool | None:
        """The pool of the model's devices, if it can take requests."""
        ...

    def holds(self, model: RemoteModel) -> bool:
        """The workers have ``model``, on their devices or in main memory."""
        ...

    def release(self, model: RemoteModel, device: torch.device | None = None) -> None:
        """Take the weights of ``model`` off the workers' devices, or off ``device`` only."""
        ...

    def finish(self, model: RemoteModel) -> None:
        """Have the workers let go of what they kept for a sampling run of ``model``."""
        ...

    def park_if_ended(self) -> None:
        """Behind a request that failed: keep a daemon thread here for good where the program ends."""
        ...


@dataclass
class RunStats:
    """What the newest sampling run cost, as SP Sampler and ``GET /sp/status`` tell it."""

    #: seconds of each forward, from the call here to its result. A step of the sampler is one forward, or two where ComfyUI does not
    #: batch the prompts
    forward_s: list[float] = field(default_factory=list)
    #: of rank 0, in all forwards together
    exchange_s: float = 0.0
    exchange_bytes: int = 0
    exchanges: int = 0
    #: of rank 0, of weights that are shared out, in all forwards together
    gathered_bytes: int = 0
    #: how the weights lay on the devices in the last forward, in a sentence; "" where nothing is to be said
    weights_line: str = ""
    #: to the workers: bytes written for them, and bytes of conditioning that they held already
    sent_bytes: int = 0
    reused_bytes: int = 0
    #: of the last forward: how it was split, and the transport with the reason for it
    decision: str = ""
    transport: str = ""
    #: what came of a compile node's wish, "" without one
    compiled: str = ""
    #: bytes of weights on each rank's device behind the last forward
    weights: tuple[int, ...] = ()
    #: names of other packs' code that runs inside the model -> how it was computed, in a sentence
    foreign: dict[str, str] = field(default_factory=dict)

    def count(self, told: Mapping[str, Any], seconds: float, sent: CallStats) -> None:
        """One more forward: ``told`` is what rank 0 says of its exchanges, ``seconds`` what it took here."""
        self.forward_s.append(seconds)
        self.exchange_s += told["exchange_s"]
        self.exchange_bytes += told["exchange_bytes"]
        self.exchanges += told["exchanges"]
        self.sent_bytes += sent.bytes_sent
        self.reused_bytes += sent.bytes_reused


class RemoteModel:
    """The computing of one patched MODEL: what its clones share, and what each of their calls goes through.

    Three callers: the patched MODEL (:class:`.patcher.SPModelPatcher`) tells when a sampling run begins and ends and asks about
    memory; its stand-in for the diffusion model (:mod:`.stand_in`) calls :meth:`forward` and :meth:`call`; the session reads
    what the workers need to load the model. :attr:`stats` is of the newest sampling run and is read by the report and the status.

    Args:
        recipe: how the workers make the model.
        session: who starts the workers and keeps the model in them.
        devices: one for each worker, by rank.
        weight_bytes: size of the model's weights.
        keep_loaded: "auto", "always" or "never", see SP Model Patch.
        departure: packs objects for the workers.
        outgoing: sorts the options of forwards.
    """

    is_vae = False
    #: of a VAE: the workers take no decode plan
    tiles_only = False
    #: what a VAE is in ComfyUI's process, for the proof that the workers have the same
    digest: Digest | None = None

    def __init__(
        self,
        session: WorkerSession,
        recipe: Recipe,
        devices: tuple[WorkerDevice, ...],
        plan: SequencePlan,
        weight_bytes: int,
        keep_loaded: str = "auto",
        requested: RequestedDegrees = NOTHING_REQUESTED,
        departure: Departure | None = None,
        outgoing: OutgoingOptions | None = None,
    ) -> None:
        self.recipe, self.devices, self.plan = recipe, devices, plan
        self.weight_bytes, self.keep_loaded, self.requested = weight_bytes, keep_loaded, requested
        #: bytes of weights that each device holds while it computes: fewer where they are shared out, which the workers tell
        self.device_bytes = weight_bytes
        self.stats = RunStats()
        #: the diffusion model as the loader left it in this process
        self.local: torch.nn.Module | None = None
        #: bytes of weights that ComfyUI lets onto this process's device
        self.allowance = math.inf
        #: SP Model Patch ran anew and files may have changed: the workers have to replay the graph. Cleared once they have
        #: (:meth:`.pool_models.PoolModels.load`)
        self.must_replay = True
        #: devices to which workers were asked to bring the weights, and not yet to take them off
        self._on_devices: frozenset[WorkerDevice] = frozenset()
        self._session = session
        self._pool_of_run: Pool | None = None
        #: number of the sampling run, by which each worker knows that another one has begun
        self._run_number: int | None = None
        self.departure = departure or Departure(torch.nn.Module(), {})
        self.outgoing = outgoing or OutgoingOptions({}, KnownObjects({}, foreign_code=True), self.departure)

    # -- a sampling run ----------------------------------------------------------------

    def prepare(self) -> None:
        """Before sampling: start the workers if there are none, and load the model where it is not loaded."""
        self.stats = RunStats()
        # ComfyUI may load the model again in the middle of a run, which does not begin another one
        self._run_number = self._run_number or time.monotonic_ns()
        self._pool_of_run = self._session.ensure(self)
        self._on_devices = frozenset(self.devices)

    def bytes_on_devices(self, device: torch.device | None = None) -> int:
        """Bytes that a worker holds on ``device``, or on any device, as far as this process knows. Never waits."""
        there = any(device is None or worker.is_on(device) for worker in self._on_devices)
        return self.device_bytes if there and self._session.holds(self) else 0

    def left(self, device: torch.device | None = None) -> None:
        """The session asks the workers to take the weights off all devices, or off ``device`` only."""
        self._on_devices = frozenset(worker for worker in self._on_devices if device is not None and not worker.is_on(device))

    def finish(self) -> None:
        """After sampling, also after a failed one. Never waits for a block that a worker still computes after a cancel."""
        self._pool_of_run = self._run_number = None
        self._session.finish(self)

    def release(self, device: torch.device | None = None) -> None:
        """Take the weights off the workers' devices, or off ``device`` only. The next sampling run brings them back."""
        self._session.release(self, device)

    def share_memory(self, places: Sequence[Sequence[Any]]) -> None:
        """The workers' weights lie at ``places`` in files: this process needs no copy of its own. See :func:`.one_copy.share_memory`.

        With accelerators ComfyUI may have pinned the memory of its own copy, and would not learn that it is gone.
        """
        if self.local is not None and all(device.kind == "cpu" for device in self.devices):
            share_memory(self.local, places)

    def headroom(self, free: int, device: torch.device) -> int:
        """Bytes that activations can have on ``device`` of this process, where ``free`` bytes are free now."""
        if device.type == "cpu" or not self.shares(device):
            return free
        weights = spare = 0
        pool = self._session.running_pool(self)
        if pool is not None:
            rank = next(rank for rank, worker in enumerate(self.devices) if worker.is_on(device))
            state = pool.shared_state.ranks[rank]
            weights, spare = state.weight_bytes, state.spare_bytes
        # After the first forward every weight that ComfyUI lets onto the device is there. Under dynamic VRAM no weight
        # has to come: weights leave the device when activations need its memory.
        all_there = bool(self.stats.forward_s) or comfy_api.dynamic_vram()
        to_come = 0 if all_there else int(min(self.device_bytes, self.allowance)) - weights
        return headroom_for_activations(free, spare, to_come)

    def shares(self, device: torch.device) -> bool:
        """A worker computes on ``device`` of this process."""
        return any(worker.is_on(device) for worker in self.devices)

    def further_devices(self, own: torch.device) -> list[torch.device]:
        """Devices of workers beside ``own``, that on which ComfyUI would compute the model."""
        return [torch.device(worker.kind, worker.index) for worker in self.devices if not worker.is_on(own)]

    # -- Channel -----------------------------------------------------------------------

    def forward(self, method: str, named: dict[str, Any], extra: dict[str, Any], transformer_options: dict[str, Any]) -> Any:
        transformer_options, skips = take_skips(transformer_options)
        plain, objects = self.outgoing.for_workers(transformer_options)
        if skips:
            plain[SKIPPED] = skips
        caches = {name: named[name] for name in self.plan.caches if name in named}
        named, extra = ({name: self._travelling(name, value) for name, value in part.items()} for part in (named, extra))
        device = _device_of(named)
        pool = self._session.ensure(self)
        if self.plan.keeps_state and pool is not self._pool_of_run:
            raise SPError("The workers ended in the middle of sampling, with what the model keeps between forwards. Queue the prompt again")
        started = time.perf_counter()
        body = {
            "key": self.recipe.key,
            "run": self._run_number,
            "method": method,
            "named": named,
            "extra": extra,
            "options": plain,
            "objects": None if objects is None else to_wire(objects.tree),
            "requested": asdict(self.requested),
            "reset": pool.out_of_step,
        }
        reply = self._call(pool, "forward", body, device, "a forward")
        pool.out_of_step = False
        self._on_devices = frozenset(self.devices)  # where ComfyUI took them off meanwhile, they are back
        self._account(pool, reply["stats"], time.perf_counter() - started)
        if objects is not None:
            self.departure.take_back(objects, from_wire(reply["changed"]))
        for name, kept in caches.items():
            kept_cache.take_back(kept, reply["caches"][name])
        return reply["output"]

    def _travelling(self, name: str, value: Any) -> Any:
        if name in self.plan.caches:
            return kept_cache.as_plain(name, value)
        change = self.plan.to_plain.get(name)
        return value if change is None or value is None else change(value)

    def call(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        pool = self._session.ensure(self)
        body = {
            "key": self.recipe.key,
            "run": self._run_number,
            "method": method,
            "args": args,
            "kwargs": kwargs,
            "requested": asdict(self.requested),
        }
        return self._call(pool, "call", body, _device_of((args, kwargs)), method)

    def _call(self, pool: Pool, operation: str, body: dict[str, Any], device: torch.device, what: str) -> Any:
        doing = f"{what} of {self.plan.architecture}"
        with asking(self._session):
            return pool.call(
                operation,
                body,
                device=device,
                doing=f"computing {doing}",
                watch=Watcher(doing),
                # ComfyUI gives every model its input and the timestep first
                volatile=tuple(f"named.{name}" for name in list(body.get("named", ()))[:2]),
            )

    def _account(self, pool: Pool, told: dict[str, Any], seconds: float) -> None:
        """Count one forward: ``told`` is what rank 0 says of it, ``seconds`` what it took here."""
        run = self.stats
        run.count(told, seconds, pool.last_call)
        run.gathered_bytes += told["gathered_bytes"]
        self.device_bytes = told["device_bytes"] or self.weight_bytes
        run.weights_line = told["weights"]
        for name in dict.fromkeys([*told["apart"], *told["whole"]]):
            calls = told["whole"].get(name, 0)
            sentence = computed_in_full(name, calls, told["why_whole"].get(name, "")) if calls else shared_out(name)
            if run.foreign.get(name) != sentence:
                log.info("SP: %s", sentence)
            run.foreign[name] = sentence
        if told["decision"] != run.decision:
            log.info("SP: %s", told["decision"])
        if told["compiled"] and not run.compiled:
            log.info("SP: %s", told["compiled"])
        run.compiled = told["compiled"]
        run.decision, run.transport = told["decision"], told["transport"]
        run.weights = tuple(state.weight_bytes for state in pool.shared_state.ranks)


@contextlib.contextmanager
def asking(session: WorkerSession) -> Iterator[None]:
    """Around a request to the workers: a cancel is ComfyUI's own, and a thread whose request fails as the program ends stays here."""
    try:
        yield
    except Cancelled:
        comfy_api.raise_interrupt()
    except SPError:
        session.park_if_ended()
        raise


def computed_in_full(name: str, calls: int, why: str = "") -> str:
    """Why a forward is slower than it could be, for people."""
    reason = f" ({why})" if why else ""
    return (
        f"{name} runs inside the model and may need the whole video{reason}, so every device computes it in full, "
        f"{calls} {'call' if calls == 1 else 'calls'} a forward; remove its node for speed"
    )


def shared_out(name: str) -> str:
    """That code of another pack costs nothing but its probe, for people."""
    return f"{name} runs inside the model and keeps its parts apart, so it is shared out between the devices after its first call"


def headroom_for_activations(free: int, spare: int, to_come: int) -> int:
    """Bytes that activations can have: what is free and what the worker has in reserve, less the weights still to come."""
    return max(0, free + spare - max(0, to_come))


def _device_of(tree: Any) -> torch.device:
    """Device of the first tensor in a call's arguments that holds data: where the result belongs."""
    devices = (leaf.device for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return next((device for device in devices if device.type != "meta"), torch.device("meta"))
