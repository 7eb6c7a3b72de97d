"""Which models this worker holds, and which of them is on its device with room for its activations."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

from torch import Tensor, nn

from ...planner.cost import ModelShape
from ...planner.weights import Weights
from ...plans import SequencePlan, shape
from ...plans.probing import Verdicts
from ...pool.shared_state import Phase
from ...pool.worker import WorkerContext
from ...weights import SharedWeights, shareable_bytes
from .. import comfy_api
from . import comfy_memory, shared_blocks
from .batch_rows import RowProofs
from .loading import loading_shown

#: less than any forward needs: the next one asks the host for memory
_NO_ROOM = -1.0


class Held(Protocol):
    """What a worker can bring to its device: a diffusion model or a VAE."""

    #: the sampling run that has begun with it on this rank, and is not over
    run: int | None
    verdicts: Any
    #: see :class:`LoadedModel`
    shared: Any

    @property
    def patcher(self) -> Any:
        """The host's ModelPatcher."""
        ...


@dataclass(eq=False)
class LoadedModel:
    """A MODEL that the user's graph gave, and the plan of its architecture."""

    #: the host's ModelPatcher
    patcher: Any
    plan: SequencePlan
    #: name of a pack's class that computes in the place of the model's, so that the forward cannot be shared out
    alone: str | None = None
    #: why its tokens are never split although there is a plan, see ``why_unsplit``
    unsplit: str = ""
    #: the sampling run that has begun with this model on this rank, and is not over
    run: int | None = None
    #: what this run has found out about code of other packs; None outside of a run
    verdicts: Verdicts | None = None
    #: what a node before SP Model Patch asked of torch.compile, see :func:`..compiled.plain_wish`
    compile_wish: dict[str, Any] | None = None
    #: of a model without a plan, what was found out about its batch rows
    row_proofs: RowProofs = field(default_factory=RowProofs)
    #: this rank's part of the blocks' weights; None while they are whole, or not on the device
    shared: SharedWeights | None = None
    #: the most of :attr:`sizes` on any rank; None before it was asked for
    agreed_sizes: Weights | None = None
    #: what *auto* was in a forward: (number of the sampling run, ranks, shared). Equal on all ranks, idle ones too
    auto_was: tuple[int, int, bool] | None = None

    @property
    def diffusion_model(self) -> nn.Module:
        return self.patcher.model.diffusion_model  # type: ignore[no-any-return]

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The model's modules by their paths. Read once, for they are some thousand."""
        return dict(self.diffusion_model.named_modules())

    @cached_property
    def shape(self) -> ModelShape | None:
        """What the planner knows of the model. Read once, for it is summed over thousands of parameters."""
        return shape.model_shape(self.plan, self.diffusion_model)

    @cached_property
    def sizes(self) -> Weights:
        """Bytes of its weights, inside the blocks and outside. Read once, for it walks over thousands of them."""
        blocks = [float(shareable_bytes(block)) for block in self.plan.blocks_of(self.diffusion_model)]
        return Weights.of(blocks, float(self.patcher.model_size()))

    def activation_bytes(self, x: Tensor) -> float:
        """Bytes that a forward on ``x`` needs beside the weights, by the host's estimate for one device."""
        return float(self.patcher.model.memory_required(list(x.shape)))


class Residency:
    """The models of one worker by their keys. At most one is active: on the device, or as far there as the host lets it."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._models: dict[str, Any] = {}
        #: a patcher; a graph that is replayed again gives the same one, and it stays active
        self._active: Any = None
        #: over how many ranks the weights of the active model's blocks are shared out; 0 where they are whole
        self._ranks = 0
        #: the host's models that it has loaded without their blocks. Clones share a model, and what is loaded of it
        self._without_blocks: weakref.WeakSet[Any] = weakref.WeakSet()
        #: bytes of activations that the host made room for beside the active model
        self._room = _NO_ROOM

    @property
    def keys(self) -> list[str]:
        return list(self._models)

    def __getitem__(self, key: str) -> Any:
        return self._models[key]

    def get(self, key: str) -> Any:
        return self._models.get(key)

    # -- which models are here -----------------------------------------------------------

    def hold(self, key: str, model: Held) -> None:
        """Hold ``model`` as ``key``, instead of what had that key."""
        old = self._models.get(key)
        if old is not None and old.patcher is model.patcher:
            model.run, model.shared = old.run, old.shared
        elif old is not None:
            self._end_run(old)
        self._models[key] = model

    def let_go_of_all_but(self, keys: Collection[str]) -> None:
        """Hold no other model. The weights of one are taken over by the next of the same checkpoint, or the host frees them."""
        for key in [key for key in self._models if key not in keys]:
            self._end_run(self._models.pop(key))
        if all(self._active is not held.patcher for held in self._models.values()):
            self._deactivate()

    def forget_all_but(self, keys: Collection[str]) -> None:
        """Let go of every other model, on the device and beside it."""
        for key in [key for key in self._models if key not in keys]:
            model = self._models.pop(key)
            self._end_run(model)
            self._take_off(model, wholly=True)

    # -- on the device or not ------------------------------------------------------------

    def activate(self, model: Held, activation_bytes: float, run: int | None, ranks: int = 0) -> None:
        """Bring ``model`` to the device, with ``activation_bytes`` free beside it, and begin the sampling run if it is new here.

        The host loads once for a sampling run. It is not done for each forward here either, but for the first
        and when one needs more room: under dynamic VRAM, loading again brings back weights that were just found not to fit.

        Args:
            run: number of the sampling run, or None outside of one. A rank that was idle begins later than the others.
            ranks: over how many ranks the weights of its blocks are shared out; 0 leaves them whole.
        """
        patcher, show = model.patcher, self._context.show
        is_active = self._active is patcher and self._ranks == ranks
        if not (is_active and activation_bytes <= self._room and comfy_memory.is_loaded(patcher)):
            if not is_active:
                self._deactivate()
            show(Phase.LOADING)
            if ranks:
                self._load_shared(model, activation_bytes, ranks)
            else:
                model.shared = None
                self._make_way(model, lambda: activation_bytes + patcher.model_size())
                self._unload_without_blocks(patcher)
                self._load(patcher, activation_bytes, show_progress=not is_active)
            self._active, self._room, self._ranks = patcher, activation_bytes, ranks
            self.show_memory(model)
        if run is not None and run != model.run:
            self._end_run(model)
            model.run, model.verdicts = run, Verdicts()
            patcher.pre_run()
        show(Phase.COMPUTING)

    @contextlib.contextmanager
    def unpatched(self) -> Iterator[None]:
        """Inside, the active model is without the objects that its patches put into it.

        Clones share the model: a node that wraps a forward which it finds must not find that of another branch.
        """
        import comfy.utils

        patcher = self._active
        backup = {} if patcher is None else dict(patcher.object_patches_backup)
        patched = {name: comfy.utils.get_attr(patcher.model, name) for name in backup}
        try:
            for name, value in backup.items():
                comfy.utils.set_attr(patcher.model, name, value)
            yield
        finally:
            for name, value in patched.items():
                comfy.utils.set_attr(patcher.model, name, value)

    def _load(self, patcher: Any, activation_bytes: float, show_progress: bool) -> None:
        import comfy.model_management

        models = comfy_memory.models_to_load(patcher)
        in_use = partial(comfy_memory.device_memory, self._context.device)
        total = sum(model.model_size() for model in models)
        with self.progress_of_loading(total, in_use) if show_progress else contextlib.nullcontext():
            comfy.model_management.load_models_gpu(models, memory_required=activation_bytes)

    def _unload_without_blocks(self, patcher: Any) -> None:
        """The host takes a model for loaded of which it has loaded all but the blocks."""
        base = getattr(patcher, "model", None)
        if base in self._without_blocks:
            comfy_memory.unload(patcher)
            self._without_blocks.discard(base)

    def _make_way(self, model: Held, needed: Callable[[], float]) -> None:
        """Shared weights of other models leave the device as far as ``model`` has no room: the host, which would ask, knows of none."""
        others = [held for held in self._models.values() if held is not model and held.shared is not None]
        for other in others:
            if comfy_memory.free_memory(self._context.device) >= needed():
                break
            other.shared = None
            comfy_memory.give_back_freed()

    def _load_shared(self, model: Held, activation_bytes: float, ranks: int) -> None:
        """What is outside the blocks, whole; of the blocks this rank's part."""
        assert isinstance(model, LoadedModel)
        blocks, context = model.plan.blocks_of(model.diffusion_model), self._context
        if model.shared is not None and model.shared.ranks != ranks:
            model.shared = None
        weights = model.patcher.model_size() / ranks if model.shared is None else 0
        # beside a rank's part there are two blocks, while it is shared out and while it computes
        self._make_way(model, lambda: activation_bytes + weights + 2 * model.sizes.largest)
        with shared_blocks.left_out(model.patcher, blocks):
            self._without_blocks.add(model.patcher.model)
            self._load(model.patcher, activation_bytes + weights, show_progress=True)
        if model.shared is None:
            model.shared = shared_blocks.share(
                model.patcher, blocks, context.rank, ranks, context.device, lambda: context.show(Phase.LOADING)
            )

    def release(self, model: Held | None, wholly: bool) -> None:
        """Take a model's weights off the device. It stays loaded in main memory as the host sees fit."""
        comfy_api.end_of_node()
        if model is not None:
            self._take_off(model, wholly)
        # ComfyUI's process knows of no other weights here, so nobody else would ever ask for their memory
        comfy_memory.unload_others([patcher for held in self._models.values() for patcher in comfy_memory.models_to_load(held.patcher)])

    def end_run(self, model: Held | None) -> None:
        """A sampling run is over: its patches and the host let go of what they kept for it, and the next run asks for memory again."""
        self._room = _NO_ROOM
        try:
            if model is not None:
                self._end_run(model)
        finally:
            comfy_api.end_of_node()

    @staticmethod
    def _end_run(model: Held) -> None:
        if model.run is not None:
            model.run = model.verdicts = None
            comfy_memory.clean_up(model.patcher)

    def _take_off(self, model: Held, wholly: bool) -> None:
        model.shared = None
        if self._active is model.patcher:
            self._deactivate()
        elif self._active is not None and self._active.is_clone(model.patcher):
            return  # the weights on the device are those of the model that is active
        comfy_memory.unload(model.patcher, wholly)

    def _deactivate(self) -> None:
        self._active, self._room, self._ranks = None, _NO_ROOM, 0

    # -- what ComfyUI's process sees of it -----------------------------------------------

    def progress_of_loading(self, total: int, in_use: Callable[[], int]) -> AbstractContextManager[None]:
        """While its block runs, the user sees how many of ``total`` bytes are in use more than before."""
        return loading_shown(total, in_use, self._context.own_state.show_loaded)

    def show_memory(self, model: Held | None) -> None:
        """Tell the bytes of weights on the device, and those that ``model`` could compute in beside what is free."""
        state = self._context.own_state
        shared = {id(held.shared): held.shared.nbytes for held in self._models.values() if held.shared is not None}
        state.weight_bytes = comfy_memory.loaded_weights(self._context.device) + sum(shared.values())
        state.spare_bytes = comfy_memory.spare_memory(model.patcher) if model is not None else 0
