"""The one pool of this process, and which models its workers hold."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
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
DROPPING = "dropping unused models"
#: how often is asked whether a prompt is over
POLL_S = 0.5

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
        #: how each model that the workers hold is made, by its key
        self._resident: dict[str, Recipe] = {}
        #: the graph whose nodes the workers have in their caches
        self._cached: dict[str, dict[str, Any]] = {}
        #: names of the loaders in the prompt that patched a MODEL last
        self._loaders: Collection[str] = ()
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

    def register(self, model: RemoteModel, loaders: Collection[str]) -> None:
        """Count ``model`` among those that ComfyUI holds, so that the workers keep what it is made of. Starts no worker.

        Args:
            loaders: names of the loaders in the prompt that runs. A node of it that runs later may make another model of theirs.
        """
        with self._lock:
            self._loaders = loaders
            self._models.add(model)
        # a finalizer can run in the middle of a call that this very thread makes, so another thread does the work
        weakref.finalize(model, _dropped, weakref.ref(self), model.recipe).atexit = False

    def held_by(self, model: RemoteModel, patcher: Any) -> None:
        """Count ``patcher`` among the clones through which ComfyUI holds ``model``. When the last is gone, the model is dropped."""
        model.patchers.add(patcher)
        weakref.finalize(patcher, _lost_a_clone, weakref.ref(self), model).atexit = False

    def drop(self, model: RemoteModel) -> None:
        """ComfyUI has dropped the MODEL of ``model``, which Python may collect much later."""
        with self._lock:
            self._models.discard(model)
        self.forget(model.recipe)

    def ensure(self, model: RemoteModel) -> Pool:
        """The pool, with ``model`` loaded in every worker."""
        with self._lock:
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
            weakref.finalize(model, _dropped, weakref.ref(self), model.recipe).atexit = False
            self._load(pool, model)

    def _load(self, pool: Pool, model: RemoteModel) -> None:
        started = time.perf_counter()
        live = {recipe.key: recipe for recipe in self._live(model.devices)} | {model.recipe.key: model.recipe}
        self._cached = self._graph(live.values())
        # the workers let go of the others before they load, also where loading fails
        self._resident = {key: recipe for key, recipe in self._resident.items() if key in live}
        body = {
            "graph": self._cached,
            "node": model.recipe.node,
            "output_index": model.recipe.output_index,
            "list_index": model.recipe.list_index,
            "values": model.recipe.values,
            "key": model.recipe.key,
            "keep": sorted(live),
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
        self._resident = {key: live[key] for key in reply["resident"] if key != model.recipe.key}
        check_same_models(model.recipe, digests["by_rank"])
        self._resident[model.recipe.key] = model.recipe
        model.must_replay = False
        log.info("model %s in %d workers after %.2f s", model.recipe.key, pool.world_size, time.perf_counter() - started)

    def _live(self, devices: tuple[WorkerDevice, ...]) -> list[Recipe]:
        return [model.recipe for model in list(self._models) if model.devices == devices]

    def _graph(self, recipes: Iterable[Recipe]) -> dict[str, dict[str, Any]]:
        """What the workers keep in their caches: all of ``recipes``, and what the running prompt may load anew otherwise."""
        wanted = self._loaders if comfy_api.running_prompts() else ()
        return {name: node for name, node in self._cached.items() if name in wanted} | union(recipes)

    def finish(self, model: RemoteModel) -> None:
        """Have the workers let go of what they kept for a sampling run of ``model``, and of its weights if it is never kept.

        Waits for the answers, except after a cancel: then another thread asks, when the last worker has left its block.
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

    def forget(self, recipe: Recipe) -> None:
        """Have the workers drop the model of ``recipe``, whose MODEL ComfyUI has dropped. Waits until the prompt that runs is over.

        Until then a node may make another model of the same checkpoint, as it does with another strength of a LoRA; the
        devices' memory is given back at once.
        """
        running = comfy_api.running_prompts()
        with self._lock, _failure_is_logged(RELEASING):
            pool = self.running_pool()
            if pool is not None and recipe.key in self._unused(pool):
                pool.call("release", _release_body(pool, recipe.key), doing=RELEASING)
        while running & comfy_api.running_prompts():
            time.sleep(POLL_S)
        with self._lock, _failure_is_logged(DROPPING):
            pool = self.running_pool()
            if pool is not None:
                self._keep(pool, {key: other for key, other in self._resident.items() if key not in self._unused(pool) & {recipe.key}})

    def _unused(self, pool: Pool) -> set[str]:
        """The models that the workers hold and ComfyUI does not."""
        return self._resident.keys() - {recipe.key for recipe in self._live(pool.devices)}

    def _keep(self, pool: Pool, kept: dict[str, Recipe]) -> None:
        """Have the workers drop all but ``kept`` and what the MODELs that ComfyUI holds are made of, if they hold anything else."""
        graph = self._graph([*self._live(pool.devices), *kept.values()])
        if kept.keys() != self._resident.keys() or self._cached.keys() - graph.keys():
            reply = pool.call("keep", {"keys": sorted(kept), "graph": graph}, doing=DROPPING)
            self._cached = graph
            self._resident = {key: kept[key] for key in reply["resident"]}

    def end(self) -> None:
        """End the workers because the program ends: no new ones are started."""
        self._ended = True
        self.close()

    def close(self) -> None:
        """End the workers, without waiting for a call that another thread makes."""
        pool, self._pool = self._pool, None
        self._resident, self._cached = {}, {}
        if pool is not None:
            pool.shutdown()


def release_body(pool: Pool, model: RemoteModel, device: torch.device | None = None) -> dict[str, Any]:
    """The request to take weights off the devices (off ``device`` only, if it is given), as things stand when it is sent."""
    return _release_body(pool, model.recipe.key, device)


def _release_body(pool: Pool, key: str, device: torch.device | None = None) -> dict[str, Any]:
    ranks = [rank for rank, worker in enumerate(pool.devices) if device is None or worker.is_on(device)]
    return {"key": key, "ranks": ranks, "wholly": device is None, "reset": pool.out_of_step}


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


def _lost_a_clone(reference: weakref.ref[Session], model: RemoteModel) -> None:
    """A clone is gone. A weak set counts the dying one still, so this looks for a live one."""
    session = reference()
    if session is not None and next(iter(model.patchers), None) is None:
        threading.Thread(target=session.drop, args=(model,), name="sp-drop", daemon=True).start()


def _dropped(reference: weakref.ref[Session], recipe: Recipe) -> None:
    session = reference()
    if session is not None:
        threading.Thread(target=session.forget, args=(recipe,), name="sp-forget", daemon=True).start()
