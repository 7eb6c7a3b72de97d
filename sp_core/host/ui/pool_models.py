"""One pool, and which models its workers hold."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import SPError
from ...pool.coordinator import Pool
from ...pool.errors import Cancelled, WorkerFailed
from .. import comfy_api
from .held_models import HeldModels
from .progress import Watcher
from .recipe import Recipe, union
from .remote_model import RemoteModel
from .same_models import check_same_models, check_same_vae

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: what a message says the workers are doing
RELEASING = "taking weights off the devices"
DROPPING = "dropping unused models"


class PoolModels:
    """The caller sees to it that one thread at a time changes the models. What only reads may be called at any time.

    Args:
        held: what ComfyUI holds; the workers keep what its MODELs on their devices are made of.
    """

    def __init__(self, pool: Pool, held: HeldModels) -> None:
        self.pool = pool
        self._held = held
        #: how each model that the workers hold is made, by its key
        self._resident: dict[str, Recipe] = {}
        #: the graph whose nodes the workers have in their caches
        self._cached: dict[str, dict[str, Any]] = {}
        #: ids of the prompts that ran when the pool was needed last
        self._prompts: set[str] = set()

    # -- is it in use ------------------------------------------------------------------

    def use(self) -> None:
        """The prompt that runs needs the pool."""
        self._prompts = comfy_api.running_prompts()

    @property
    def in_use(self) -> bool:
        """The prompt that needed the pool last still runs."""
        return not self._prompts.isdisjoint(comfy_api.running_prompts())

    def holds(self, model: RemoteModel) -> bool:
        """The workers have ``model``, on their devices or in main memory."""
        return self.pool.usable and model.recipe.key in self._resident

    # -- loading -----------------------------------------------------------------------

    def load(self, model: RemoteModel) -> None:
        """Load the model without the CLIPs that its recipe leaves out, and with them if that does not give the same model.

        Raises:
            SPError: a rank could not make it, or the ranks made different ones.
        """
        try:
            self._load(model)
        except SPError as error:
            if model.recipe.fallback is None or not self.pool.usable:
                raise
            log.info("%s; loading it once more with the CLIPs of its graph", error)
            model.recipe = model.recipe.fallback
            self._held.add(model)
            self._load(model)

    def _load(self, model: RemoteModel) -> None:
        started, pool = time.perf_counter(), self.pool
        live = {recipe.key: recipe for recipe in self._live()} | {model.recipe.key: model.recipe}
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
            "is_vae": model.is_vae,
            "tiles_only": model.tiles_only,
            "weight_bytes": model.weight_bytes,
        }
        try:
            watch, doing = Watcher("loading the model"), "loading the model"
            reply = pool.call("load", body, doing=doing, watch=watch, volatile=("values",))
            asked = {"outputs": list(model.recipe.models), "vae": model.recipe.key if model.is_vae else None}
            digests = pool.call("digests", asked, doing=doing, watch=watch)
        except Cancelled:
            comfy_api.raise_interrupt()
        except WorkerFailed as error:
            raise SPError(model.recipe.with_users_names(str(error))) from error
        # a model that differs is not used: the next prompt loads it again, and proves it again
        self._resident = {key: live[key] for key in reply["resident"] if key != model.recipe.key}
        check_same_models(model.recipe, digests["by_rank"])
        if model.is_vae:
            check_same_vae(model.recipe, model.digest, digests["vae_by_rank"])
        self._resident[model.recipe.key] = model.recipe
        model.share_memory(reply["places"])
        model.must_replay = False
        log.info("model %s in %d workers after %.2f s", model.recipe.key, pool.world_size, time.perf_counter() - started)

    def _live(self) -> list[Recipe]:
        return self._held.recipes(self.pool.devices)

    def _graph(self, recipes: Iterable[Recipe]) -> dict[str, dict[str, Any]]:
        """What the workers keep in their caches: all of ``recipes``, and what the running prompt may load anew otherwise."""
        wanted = self._held.loaders if comfy_api.running_prompts() else ()
        return {name: node for name, node in self._cached.items() if name in wanted} | union(recipes)

    # -- letting go --------------------------------------------------------------------

    def finish(self, model: RemoteModel) -> None:
        """Let go of what was kept for a sampling run of ``model``, and of its weights if it is never kept.

        This never waits for a block that a worker still computes after a cancel.
        """
        pool = self.pool
        pool.forget_sent()
        pool.afterwards("finish", {"key": model.recipe.key, "method": model.plan.after_run}, "clearing up after sampling", wait=False)
        if model.keep_loaded == "never":
            model.left()
            pool.afterwards("release", partial(release_body, pool, model.recipe.key), RELEASING)

    def release(self, model: RemoteModel, device: torch.device | None = None) -> None:
        """Take the weights of ``model`` off the devices and out of pinned memory, or off ``device`` only."""
        if self.holds(model):
            # ComfyUI asks for the memory in the middle of other work, which can go on: workers that died hold none
            with failure_is_logged(RELEASING):
                self.pool.call("release", partial(release_body, self.pool, model.recipe.key, device), doing=RELEASING)

    def release_unused(self, key: str) -> None:
        """Take the weights of the model ``key`` off the devices, unless ComfyUI holds a MODEL that is made so."""
        if self.pool.usable and key in self._unused():
            with failure_is_logged(RELEASING):
                self.pool.call("release", release_body(self.pool, key), doing=RELEASING)

    def drop_unused(self, key: str) -> None:
        """Drop the model ``key``, unless ComfyUI holds a MODEL that is made so, and cached nodes that no MODEL is made of."""
        if not self.pool.usable:
            return
        kept = {other: recipe for other, recipe in self._resident.items() if other not in self._unused() & {key}}
        graph = self._graph([*self._live(), *kept.values()])
        if kept.keys() != self._resident.keys() or self._cached.keys() - graph.keys():
            with failure_is_logged(DROPPING):
                reply = self.pool.call("keep", {"keys": sorted(kept), "graph": graph}, doing=DROPPING)
                self._cached = graph
                self._resident = {key: kept[key] for key in reply["resident"]}

    def _unused(self) -> set[str]:
        """The models that the workers hold and ComfyUI does not."""
        return self._resident.keys() - {recipe.key for recipe in self._live()}


def release_body(pool: Pool, key: str, device: torch.device | None = None) -> dict[str, Any]:
    """The request to take weights off the devices (off ``device`` only, if it is given), as things stand when it is sent."""
    ranks = [rank for rank, worker in enumerate(pool.devices) if device is None or worker.is_on(device)]
    return {"key": key, "ranks": ranks, "wholly": device is None, "reset": pool.out_of_step}


@contextlib.contextmanager
def failure_is_logged(doing: str) -> Iterator[None]:
    """A failure of the block becomes a line in the log, and the caller goes on."""
    try:
        yield
    except SPError as error:
        log.warning("%s: %s", doing, error)
