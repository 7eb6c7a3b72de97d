"""The one pool of this process and the models that live in it."""

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
from .remote_model import RELEASING, RemoteModel
from .worker_arguments import worker_arguments

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

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
    """Starts the pool when a model needs it, restarts it for other devices, and knows which models it holds."""

    def __init__(self) -> None:
        # orders this process's threads; what only looks (status, sizes) does without
        self._lock = threading.RLock()
        self._pool: Pool | None = None
        self._ended = False
        self._resident: set[str] = set()
        # alive exactly as long as the host keeps the MODEL: the workers' caches follow the host's
        self._models: weakref.WeakSet[RemoteModel] = weakref.WeakSet()
        #: MODELs that SP Sampler patched itself, by the MODEL it was given: the next run finds its model in the workers
        self.patched: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @property
    def pool(self) -> Pool | None:
        """The newest pool, in whatever state."""
        return self._pool

    @property
    def models(self) -> list[RemoteModel]:
        """Every patched MODEL that the host still holds."""
        return list(self._models)

    def running_pool(self) -> Pool | None:
        return self._pool if self._pool is not None and self._pool.usable else None

    def holds(self, model: RemoteModel) -> bool:
        """The workers have the model, on their devices or beside them."""
        return self.running_pool() is not None and model.recipe.key in self._resident

    def ensure(self, model: RemoteModel) -> Pool:
        """The pool, with ``model`` loaded in every worker."""
        with self._lock:
            if model not in self._models:
                self._models.add(model)
                # a finalizer may run in the middle of a call of this very thread: prune in another
                weakref.finalize(model, _prune_later, weakref.ref(self)).atexit = False
            pool = self._ready(model.devices) or self._start(model.devices)
            if model.fresh or model.recipe.key not in self._resident:
                self._load(pool, model)
            return pool

    def _ready(self, devices: tuple[WorkerDevice, ...]) -> Pool | None:
        """The pool that is there, if it has these devices and is in order."""
        pool = self._pool
        if pool is None or pool.over:
            return None
        if pool.devices != devices:
            log.info("the device list changed: restarting the workers")
            return None
        try:
            # what a cancelled prompt left: workers that are still starting, or finishing a block
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
            # a sampler in another thread may still run while the program ends
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

    def _load(self, pool: Pool, model: RemoteModel) -> None:
        started = time.perf_counter()
        live = self._live(model.devices)
        body = {
            "graph": union(live),
            "node": model.recipe.node,
            "slot": model.recipe.slot,
            "key": model.recipe.key,
            "keep": sorted({recipe.key for recipe in live}),
            "architecture": model.plan.architecture,
            "weight_bytes": model.weight_bytes,
        }
        try:
            reply = pool.call("load", body, doing="loading the model", watch=Watcher("loading the model"))
        except Cancelled:
            comfy_api.raise_interrupt()
        except WorkerFailed as error:
            raise SPError(_with_origin(str(error), model)) from error
        self._resident = set(reply["resident"])
        model.fresh = False
        log.info("model %s in %d workers after %.2f s", model.recipe.key, pool.world_size, time.perf_counter() - started)

    def _live(self, devices: tuple[WorkerDevice, ...]) -> list[Recipe]:
        return [model.recipe for model in list(self._models) if model.devices == devices]

    def release(self, model: RemoteModel, device: torch.device | None = None) -> None:
        """The model's weights off the workers' devices, and out of pinned memory; off ``device`` only where one is named."""
        with self._lock:
            pool = self.running_pool()
            if pool is not None and model.recipe.key in self._resident:
                # the host asks in the middle of something else, which can go on: dead workers hold nothing
                with _warned(RELEASING):
                    pool.call("release", partial(model.release_body, pool, device), doing=RELEASING)

    def release_all(self) -> int:
        """Every model's weights off the devices; bytes that all workers held before."""
        with self._lock:
            pool = self.running_pool()
            held = sum(state.weight_bytes for state in pool.shared_state.ranks) if pool is not None else 0
            for model in self.models:
                model.release()
            return held

    def prune(self) -> None:
        """Drop models in the workers whose MODEL the host has let go of."""
        with self._lock:
            pool = self.running_pool()
            if pool is None:
                return
            live = self._live(pool.devices)
            keys = {recipe.key for recipe in live}
            if self._resident - keys:
                with _warned("dropping unused models"):
                    reply = pool.call("keep", {"keys": sorted(keys), "graph": union(live)}, doing="dropping unused models")
                    self._resident = set(reply["resident"])

    def end(self) -> None:
        """The program ends."""
        self._ended = True
        self.close()

    def close(self) -> None:
        """End the workers. Does not wait for a call that another thread is in."""
        pool, self._pool = self._pool, None
        self._resident = set()
        if pool is not None:
            pool.shutdown()


def _interrupting(watcher: Watcher) -> Callable[[Pool], bool]:
    """For waits that have no request to cancel: raise at once."""

    def watch(pool: Pool) -> bool:
        if watcher(pool):
            comfy_api.raise_interrupt()
        return False

    return watch


@contextlib.contextmanager
def _warned(doing: str) -> Iterator[None]:
    """A failure is worth a line in the log, not the end of what the caller does."""
    try:
        yield
    except SPError as error:
        log.warning("%s: %s", doing, error)


def _with_origin(text: str, model: RemoteModel) -> str:
    """Put the user's node ids where the replayed graph's names stand."""
    for name, origin in model.recipe.origin.items():
        text = text.replace(name, origin)
    return text


def _prune_later(reference: weakref.ref[Session]) -> None:
    session = reference()
    if session is not None:
        threading.Thread(target=session.prune, name="sp-prune", daemon=True).start()
