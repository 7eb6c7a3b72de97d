"""The one pool of this process, and which models its workers hold."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import SPError
from ...pool.coordinator import Pool
from ...pool.devices import WorkerDevice
from ...pool.errors import Cancelled, WorkerFailed
from ...pool.launcher import ServiceSpec
from .. import comfy_api
from .progress import Watcher
from .recipe import Recipe, union
from .remote_model import RemoteModel
from .same_models import check_same_models
from .worker_arguments import worker_arguments

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: what a message says the workers are doing
RELEASING = "taking weights off the devices"

_session: Session | None = None
_lock = threading.Lock()


def session() -> Session:
    """The session of this process, made on first use."""
    global _session
    with _lock:
        if _session is None:
            import atexit

            _session = Session()
            atexit.register(_session.end)
        return _session


class Session:
    """Starts the pool when a model needs it, restarts it for other devices, and decides which models its workers hold."""

    def __init__(self) -> None:
        # One thread at a time changes the pool or the models in it. Functions that only read take no lock, so that the
        # status page and ComfyUI's memory management never wait for a forward.
        self._lock = threading.RLock()
        self._pool: Pool | None = None
        self._ended = False
        self._resident: set[str] = set()
        # a RemoteModel lives as long as ComfyUI keeps its MODEL, and the workers keep the model as long
        self._models: weakref.WeakSet[RemoteModel] = weakref.WeakSet()
        #: the MODELs that SP Sampler patched itself, by the MODEL that it was given
        self.patched_by_sampler: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @property
    def pool(self) -> Pool | None:
        """The newest pool, whether it starts, runs or is over."""
        return self._pool

    @property
    def models(self) -> list[RemoteModel]:
        """Every patched MODEL that ComfyUI still holds."""
        return list(self._models)

    def running_pool(self) -> Pool | None:
        """The pool, if it can take requests."""
        return self._pool if self._pool is not None and self._pool.usable else None

    def holds(self, model: RemoteModel) -> bool:
        """The workers have ``model``, on their devices or in main memory."""
        return self.running_pool() is not None and model.recipe.key in self._resident

    def ensure(self, model: RemoteModel) -> Pool:
        """The pool, with ``model`` loaded in every worker."""
        with self._lock:
            if model not in self._models:
                self._models.add(model)
                # a finalizer can run in the middle of a call that this very thread makes, so another thread prunes
                weakref.finalize(model, _prune_later, weakref.ref(self)).atexit = False
            pool = self._ready(model.devices) or self._start(model.devices)
            if model.must_replay or model.recipe.key not in self._resident:
                self._load_as_lean_as_possible(pool, model)
            return pool

    def _ready(self, devices: tuple[WorkerDevice, ...]) -> Pool | None:
        """The present pool, if it has these devices and can take a request. Waits until it can."""
        pool = self._pool
        if pool is None or pool.over:
            return None
        if pool.devices != devices:
            log.info("the device list changed: restarting the workers")
            return None
        try:
            # a cancelled prompt can leave workers that still start, or still compute a block
            if not pool.usable:
                pool.join(_interrupting(Watcher("starting")))
            pool.settle(Watcher("finishing what was cancelled"))
        except Cancelled:
            comfy_api.raise_interrupt()
        except SPError as error:
            log.warning("%s", error)
            return None
        return pool

    def _start(self, devices: tuple[WorkerDevice, ...]) -> Pool:
        self.close()
        if self._ended:
            # another thread may still sample while the program ends
            raise SPError("ComfyUI is ending; no workers are started any more")
        pool = self._pool = Pool(devices, self._service(devices))
        pool.launch()
        pool.join(_interrupting(Watcher("starting")))
        return pool

    def _service(self, devices: tuple[WorkerDevice, ...]) -> ServiceSpec:
        import sys

        options = {
            "host_root": comfy_api.host_root(),
            "arguments": worker_arguments(sys.argv[1:], cpu=devices[0].kind == "cpu"),
            "catalogue": comfy_api.node_catalogue(),
        }
        return ServiceSpec("sp_core.host.worker.service:HostService", options, before_torch="sp_core.host.worker.before_torch:prepare")

    def _load_as_lean_as_possible(self, pool: Pool, model: RemoteModel) -> None:
        """Load the model without the CLIPs that its recipe leaves out, and with them if that does not give the same model."""
        try:
            self._load(pool, model)
        except SPError as error:
            if model.recipe.fallback is None or not pool.usable:
                raise
            log.info("%s; loading it once more with the CLIPs of its graph", error)
            model.recipe = model.recipe.fallback
            self._load(pool, model)

    def _load(self, pool: Pool, model: RemoteModel) -> None:
        started = time.perf_counter()
        live = self._live(model.devices)
        body = {
            "graph": union(live),
            "node": model.recipe.node,
            "output_index": model.recipe.output_index,
            "list_index": model.recipe.list_index,
            "values": model.recipe.values,
            "key": model.recipe.key,
            "keep": sorted({recipe.key for recipe in live}),
            "architecture": model.plan.architecture,
            "weight_bytes": model.weight_bytes,
        }
        try:
            watch, doing = Watcher("loading the model"), "loading the model"
            reply = pool.call("load", body, doing=doing, watch=watch, volatile=("values",))
            digests = pool.call("digests", {"outputs": list(model.recipe.models)}, doing=doing, watch=watch)
        except Cancelled:
            comfy_api.raise_interrupt()
        except WorkerFailed as error:
            raise SPError(model.recipe.with_users_names(str(error))) from error
        # a model that differs is not used: the next prompt loads it again, and proves it again
        self._resident = set(reply["resident"]) - {model.recipe.key}
        check_same_models(model.recipe, digests["by_rank"])
        self._resident.add(model.recipe.key)
        model.must_replay = False
        log.info("model %s in %d workers after %.2f s", model.recipe.key, pool.world_size, time.perf_counter() - started)

    def _live(self, devices: tuple[WorkerDevice, ...]) -> list[Recipe]:
        return [model.recipe for model in list(self._models) if model.devices == devices]

    def finish(self, model: RemoteModel) -> None:
        """Have the workers let go of what they kept for a sampling run of ``model``, and of its weights if it is never kept.

        This takes no lock and never waits for a block that a worker still computes after a cancel.
        """
        pool = self.running_pool()
        if pool is None:
            return
        pool.forget_sent()
        pool.afterwards("finish", {"key": model.recipe.key, "method": model.plan.after_run}, "clearing up after sampling")
        if model.keep_loaded == "never":
            model.on_devices = False
            pool.afterwards("release", partial(release_body, pool, model), RELEASING)

    def release(self, model: RemoteModel, device: torch.device | None = None) -> None:
        """Take the weights of ``model`` off the workers' devices and out of pinned memory, or off ``device`` only."""
        model.on_devices = False
        with self._lock:
            pool = self.running_pool()
            if pool is not None and model.recipe.key in self._resident:
                # ComfyUI asks for the memory in the middle of other work, which can go on: workers that died hold none
                with _failure_is_logged(RELEASING):
                    pool.call("release", partial(release_body, pool, model, device), doing=RELEASING)

    def release_all(self) -> int:
        """Take every model's weights off the devices. Returns the bytes that all workers held before."""
        with self._lock:
            pool = self.running_pool()
            held = sum(state.weight_bytes for state in pool.shared_state.ranks) if pool is not None else 0
            for model in self.models:
                self.release(model)
            return held

    def prune(self) -> None:
        """Have the workers drop every model whose MODEL ComfyUI has dropped."""
        with self._lock:
            pool = self.running_pool()
            if pool is None:
                return
            live = self._live(pool.devices)
            keys = {recipe.key for recipe in live}
            if self._resident - keys:
                with _failure_is_logged("dropping unused models"):
                    reply = pool.call("keep", {"keys": sorted(keys), "graph": union(live)}, doing="dropping unused models")
                    self._resident = set(reply["resident"])

    def end(self) -> None:
        """End the workers because the program ends: no new ones are started."""
        self._ended = True
        self.close()

    def close(self) -> None:
        """End the workers, without waiting for a call that another thread makes."""
        pool, self._pool = self._pool, None
        self._resident = set()
        if pool is not None:
            pool.shutdown()


def release_body(pool: Pool, model: RemoteModel, device: torch.device | None = None) -> dict[str, Any]:
    """The request to take weights off the devices (off ``device`` only, if it is given), as things stand when it is sent."""
    ranks = [rank for rank, worker in enumerate(pool.devices) if device is None or worker.is_on(device)]
    return {"key": model.recipe.key, "ranks": ranks, "wholly": device is None, "reset": pool.out_of_step}


def _interrupting(watcher: Watcher) -> Callable[[Pool], bool]:
    """While workers start there is no request that they could cancel: this raises ComfyUI's interrupt at once."""

    def watch(pool: Pool) -> bool:
        if watcher(pool):
            comfy_api.raise_interrupt()
        return False

    return watch


@contextlib.contextmanager
def _failure_is_logged(doing: str) -> Iterator[None]:
    """A failure of the block becomes a line in the log, and the caller goes on."""
    try:
        yield
    except SPError as error:
        log.warning("%s: %s", doing, error)


def _prune_later(reference: weakref.ref[Session]) -> None:
    session = reference()
    if session is not None:
        threading.Thread(target=session.prune, name="sp-prune", daemon=True).start()
