"""Which pools there are in this process, and who may use them."""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import SPError
from ...pool.coordinator import Pool
from ...pool.devices import WorkerDevice, shared_devices
from ...pool.errors import Cancelled
from ...pool.launcher import ServiceSpec
from ...settings import idle_s
from .. import comfy_api
from .device_input import named_lists
from .held_models import HeldModels
from .idle import end_when_idle
from .pool_models import PoolModels
from .progress import Watcher
from .recipe import Recipe
from .remote_model import RemoteModel
from .worker_arguments import worker_arguments

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: how often is asked whether a prompt is over
PROMPT_POLL_S = 0.5

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
    """Starts a pool for each device list that a prompt needs, and ends the pools that make way for it."""

    def __init__(self) -> None:
        # One thread at a time changes a pool or the models in it. Functions that only read take no lock, so that the
        # status page and ComfyUI's memory management never wait for a forward.
        self._lock = threading.RLock()
        self._pools: dict[tuple[WorkerDevice, ...], PoolModels] = {}
        self._ended = False
        self._held = HeldModels(self.forget)
        #: the MODELs that SP Sampler patched itself, by the MODEL that it was given
        self.patched_by_sampler: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    # -- what there is -----------------------------------------------------------------

    @property
    def pools(self) -> list[PoolModels]:
        """Every pool that starts or runs."""
        return [models for models in list(self._pools.values()) if not models.pool.over]

    @property
    def models(self) -> list[RemoteModel]:
        """Every patched MODEL that ComfyUI still holds."""
        return list(self._held)

    def running_pool(self, model: RemoteModel) -> Pool | None:
        """The pool of the model's devices, if it can take requests."""
        models = self._running(model)
        return None if models is None else models.pool

    def holds(self, model: RemoteModel) -> bool:
        """The workers have ``model``, on their devices or in main memory."""
        models = self._running(model)
        return models is not None and models.holds(model)

    def _running(self, model: RemoteModel) -> PoolModels | None:
        models = self._pools.get(model.devices)
        return models if models is not None and models.pool.usable else None

    def register(self, model: RemoteModel, loaders: Collection[str]) -> None:
        """Count ``model`` among those that ComfyUI holds, so that the workers keep what it is made of. Starts no worker.

        Args:
            loaders: names of the loaders in the prompt that runs. A node of it that runs later may make another model of theirs.
        """
        with self._lock:
            self._held.loaders = loaders
            self._held.add(model)

    # -- pools come and go -------------------------------------------------------------

    def ensure(self, model: RemoteModel) -> Pool:
        """The pool of the model's devices, with ``model`` loaded in every worker.

        Raises:
            SPError: the workers cannot be started, or the prompt uses some of the devices in another list.
        """
        try:
            with self._lock:
                models = self._pools.get(model.devices)
                if models is None or not models.in_use:
                    self._make_way(model.devices)
                models = self._ready(model.devices) or self._start(model.devices)
                if model.must_replay or not models.holds(model):
                    models.load(model)
                return models.pool
        except SPError:
            self.park_if_ended()
            raise

    def _ready(self, devices: tuple[WorkerDevice, ...]) -> PoolModels | None:
        """The present pool of these devices, if it can take a request. Waits until it can."""
        models = self._pools.get(devices)
        if models is None or models.pool.over:
            return None
        models.use()
        try:
            # a cancelled prompt can leave workers that still start, or still compute a block
            if not models.pool.usable:
                models.pool.join(_interrupting(Watcher("starting")))
            models.pool.settle(Watcher("finishing what was cancelled"))
        except Cancelled:
            comfy_api.raise_interrupt()
        except SPError as error:
            log.warning("%s", error)
            return None
        return models

    def _start(self, devices: tuple[WorkerDevice, ...]) -> PoolModels:
        self._end(self._pools.get(devices))
        if self._ended:
            # another thread may still sample while the program ends
            raise SPError("ComfyUI is ending; no workers are started any more")
        pool = Pool(devices, _service(devices))
        models = self._pools[devices] = PoolModels(pool, self._held)
        models.use()
        pool.launch()
        if limit_s := idle_s():
            end_when_idle(pool, limit_s, lambda: models.in_use, partial(self._end_unused, models))
        pool.join(_interrupting(Watcher("starting")))
        return models

    def _make_way(self, devices: tuple[WorkerDevice, ...]) -> None:
        """The prompt that runs begins to use ``devices``: end each pool that it does not name, or that shares a device with them.

        Raises:
            SPError: the prompt has used one that shares a device with them.
        """
        named = named_lists(comfy_api.running_nodes())
        for other in self.pools:
            its = other.pool.devices
            common = shared_devices(devices, its)
            if its == devices or (other.in_use and not common):
                continue
            if other.in_use:
                raise SPError(_overlap(devices, its, common))
            if common or (named is not None and its not in named):
                log.info("the device list changed: ending the workers on %s", _names(its))
                self._end(other)

    def _end_unused(self, models: PoolModels) -> bool:
        """End a pool, or give false where another thread takes it in use."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if models.in_use or models.pool.is_busy():
                return False
            self._end(models)
            return True
        finally:
            self._lock.release()

    def end(self) -> None:
        """End all workers because the program ends: no new ones are started."""
        self._ended = True
        self.close()

    def park_if_ended(self) -> None:
        """A request failed: where that is because the program ends, a daemon thread stays here for good.

        Python ends such a thread anyway, and aborts the program where it meets it in the middle of torch's code, as
        it would be when ComfyUI prints the inputs of the node that failed.
        """
        if self._ended and threading.current_thread().daemon:
            threading.Event().wait()

    def close(self) -> None:
        """End all workers, without waiting for a call that another thread makes."""
        for models in list(self._pools.values()):
            self._end(models)

    def _end(self, models: PoolModels | None) -> None:
        if models is not None:
            if self._pools.get(models.pool.devices) is models:
                del self._pools[models.pool.devices]
            models.pool.shutdown()

    # -- letting go --------------------------------------------------------------------

    def finish(self, model: RemoteModel) -> None:
        """Have the workers let go of what they kept for a sampling run of ``model``, and of its weights if it is never kept.

        Waits for no answer. After a cancel another thread asks, when the last worker has left its block.
        """
        models = self._running(model)
        if models is not None:
            models.finish(model)

    def release(self, model: RemoteModel, device: torch.device | None = None) -> None:
        """Take the weights of ``model`` off the workers' devices and out of pinned memory, or off ``device`` only."""
        model.left(device)
        with self._lock:
            models = self._running(model)
            if models is not None:
                models.release(model, device)

    def release_all(self) -> int:
        """Take every model's weights off the devices. Returns the bytes that all workers held before."""
        with self._lock:
            running = [models.pool for models in self.pools if models.pool.usable]
            held = sum(state.weight_bytes for pool in running for state in pool.shared_state.ranks)
            for model in self.models:
                self.release(model)
            return held

    def forget(self, recipe: Recipe) -> None:
        """Have the workers drop the model of ``recipe``, whose MODEL ComfyUI has dropped. Waits until the prompt that runs is over.

        Until then a node may make another model of the same checkpoint, as it does with another strength of a LoRA; the
        devices' memory is given back at once.
        """
        running = comfy_api.running_prompts()
        with self._lock:
            for models in self.pools:
                models.release_unused(recipe.key)
        while running & comfy_api.running_prompts():
            time.sleep(PROMPT_POLL_S)
        with self._lock:
            for models in self.pools:
                models.drop_unused(recipe.key)


def _service(devices: tuple[WorkerDevice, ...]) -> ServiceSpec:
    options = {
        "host_root": comfy_api.host_root(),
        "arguments": worker_arguments(sys.argv[1:], cpu=devices[0].kind == "cpu"),
        "catalogue": comfy_api.node_catalogue(),
    }
    return ServiceSpec("sp_core.host.worker.service:HostService", options, before_torch="sp_core.host.worker.before_torch:prepare")


def _names(devices: Collection[WorkerDevice]) -> str:
    return ", ".join(map(str, devices))


def _overlap(one: Collection[WorkerDevice], other: Collection[WorkerDevice], common: Collection[WorkerDevice]) -> str:
    """Why two device lists cannot be used in one prompt, for a person."""
    return (
        f"Two SP nodes of this prompt use different device lists, {_names(other)} and {_names(one)}, and both need {_names(common)}. "
        "Each switch between them would start all workers anew. Give both nodes the same devices, or devices of their own"
    )


def _interrupting(watcher: Watcher) -> Callable[[Pool], bool]:
    """While workers start there is no request that they could cancel: this raises ComfyUI's interrupt at once."""

    def watch(pool: Pool) -> bool:
        if watcher(pool):
            comfy_api.raise_interrupt()
        return False

    return watch
