"""The MODEL that SP Model Patch returns."""

from __future__ import annotations

import copy
import inspect
import weakref
from dataclasses import replace
from typing import Any

import comfy.model_patcher
import comfy.utils
import torch
from comfy.patcher_extension import WrappersMP

from ...planner.degrees import NOTHING_REQUESTED, RequestedDegrees, largest_part
from ...plans import plan_of, plan_without
from ...pool.devices import WorkerDevice
from .. import comfy_api
from ..block_skips import leaves_out_its_block
from ..compiled import COMPILE_ARGUMENTS, COMPILE_KEY, WISH, asked_for, is_compiled, original, plain_wish
from ..options import CLASS, LATE_FORWARDS, MODEL_SAMPLING, WINDOW, name_of, patches_in
from ..travel import CannotTravel
from .departure import Departure
from .device_memory import DeviceShares
from .known_objects import KnownObjects
from .late_callbacks import LateCallbacks
from .outgoing_options import OutgoingOptions, hooked, placed_too_late, with_own_patches
from .recipe import Recipe
from .remote_model import RemoteModel, WorkerSession
from .shared_size import device_bytes
from .stand_in import make_stand_in
from .watch import SwapWatch

#: the path of an object patch that replaces the model's own forward
_FORWARD = "diffusion_model.forward"


class SPModelPatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher whose diffusion model computes in the workers.

    It has a BaseModel of its own, which shares everything but the diffusion model with the loader's. So a plain clone
    of the loader's MODEL can be sampled in the same prompt and computes as it would without this one.
    """

    sp: RemoteModel
    watch: SwapWatch
    late_callbacks: LateCallbacks
    shares: DeviceShares
    #: paths of the object patches inside the model that the workers have
    own_patches: frozenset[str]

    def clone(self, *args: Any, **kwargs: Any) -> SPModelPatcher:
        other = super().clone(*args, **kwargs)
        other.sp, other.watch, other.late_callbacks = self.sp, self.watch, self.late_callbacks
        other.shares, other.own_patches = self.shares, self.own_patches
        return other

    def pre_run(self) -> None:
        self.sp.outgoing.check(self.model_options.get("transformer_options", {}))
        self.sp.prepare()
        self.watch.begin()
        self.watch.check()
        self.late_callbacks.warn(self.callbacks)
        super().pre_run()
        if self.late_callbacks.workers_run_the_same(self.callbacks):
            # what the callbacks changed the workers have as well
            self.watch.accept()

    def cleanup(self) -> None:
        super().cleanup()
        self.watch.end()
        self.sp.finish()

    # -- memory: ComfyUI manages what a worker holds on this process's device, and by the shares what others hold on theirs

    def model_patches_models(self) -> list[Any]:
        return [*super().model_patches_models(), *self.shares.counted()]

    def loaded_size(self) -> int:
        own = self.load_device if self.sp.shares(self.load_device) else None
        return min(self.model_size(), self.sp.bytes_on_devices(own))

    def partially_load(self, device_to: Any, extra_memory: Any = 0, force_patch_weights: bool = False) -> int:
        before = self.loaded_size()
        self.sp.allowance = before + extra_memory
        self.patch_model(device_to, load_weights=False)
        self.sp.prepare()
        self.model.device = device_to
        return self.loaded_size() - before

    def partially_unload(self, device_to: Any, memory_to_free: Any = 0, force_patch_weights: bool = False) -> int:
        """ComfyUI wants memory: all of the workers' weights leave the devices. Returns their size in bytes."""
        if self.sp.keep_loaded == "always":
            # If this reports less than was asked for, ComfyUI detaches the model and drops it from its list of loaded
            # models, and the unload button no longer reaches it. ComfyUI measures free memory by itself.
            return int(memory_to_free)
        freed = self.loaded_size()
        self.sp.release(self.load_device)
        return freed

    def get_free_memory(self, device: Any) -> int:
        """Bytes by which ComfyUI decides whether to batch conditionings: the same before and after the workers load weights."""
        return self.sp.headroom(int(super().get_free_memory(device)), device)

    def detach(self, unpatch_all: bool = True) -> Any:
        # without this, a clone would take over what is loaded, and ComfyUI would go on counting it
        if unpatch_all:
            self.sp.release()
        return super().detach(unpatch_all)

    # -- what only the workers could honour ------------------------------------------

    def add_patches(self, patches: Any, *args: Any, **kwargs: Any) -> Any:
        if not patches:
            return super().add_patches(patches, *args, **kwargs)
        raise self._too_late(f"A weight patch of {len(patches)} weights (a LoRA or a merge)")

    def add_hook_patches(self, hook: Any, patches: Any, *args: Any, **kwargs: Any) -> Any:
        raise hooked(f"A hook ({type(hook).__name__})")

    def add_object_patch(self, name: str, obj: Any) -> None:
        if not _inside_the_model(name):
            super().add_object_patch(name, obj)
        elif is_compiled(obj) and original(obj) == comfy.utils.get_attr(self.model, name):
            self.model_options["transformer_options"][WISH] = asked_for(obj)
        elif self._is_late_forward(name, obj):
            self._check_travels(f"An object patch of {name} ({name_of(obj)})", obj)
            self.model_options["transformer_options"].setdefault(LATE_FORWARDS, {})[name] = obj
        else:
            raise self._too_late(f"An object patch of {name}")

    def get_model_object(self, name: str) -> Any:
        late = self.model_options["transformer_options"].get(LATE_FORWARDS) or {}
        return late[name] if name in late else super().get_model_object(name)

    def _is_late_forward(self, name: str, obj: Any) -> bool:
        """The forward of a module below the model, which no node before SP Model Patch has replaced."""
        path, _, attribute = name.rpartition(".")
        if attribute != "forward" or path == "diffusion_model" or name in self.own_patches or not callable(obj):
            return False
        return isinstance(comfy.utils.get_attr(self.model, path), torch.nn.Module)

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Any) -> None:
        if (wrapper_type, key) == (WrappersMP.APPLY_MODEL, COMPILE_KEY):
            # the compiled model would take the place of the remote one and compute here, without the workers
            super().add_wrapper_with_key(wrapper_type, key, _ask_workers_to_compile)
        else:
            super().add_wrapper_with_key(wrapper_type, key, wrapper)

    def add_weight_wrapper(self, name: str, function: Any) -> None:
        raise self._too_late(f"A weight wrapper of {name} ({name_of(function)})")

    def set_model_compute_dtype(self, dtype: Any) -> None:
        raise self._too_late(f"A compute dtype ({dtype})")

    def set_model_patch(self, patch: Any, name: str) -> None:
        self._check_travels(f"A patch ({name}: {name_of(patch)})", patch)
        super().set_model_patch(patch, name)

    def set_model_patch_replace(self, patch: Any, name: str, block_name: str, number: Any, transformer_index: Any = None) -> None:
        self._check_travels(f"A patch ({name} of {block_name} {number}: {name_of(patch)})", patch)
        super().set_model_patch_replace(patch, name, block_name, number, transformer_index)

    def set_model_optimized_attention(self, optimized_attention: Any) -> None:
        self._check_travels(f"An attention function ({name_of(optimized_attention)})", optimized_attention)
        super().set_model_optimized_attention(optimized_attention)

    def set_injections(self, key: str, injections: Any) -> None:
        if injections:
            raise self._too_late(f"An injection ({key})")

    # -- nodes that read weights: this process has the file's weights, without the patches that the workers apply

    def get_key_patches(self, filter_prefix: Any = None) -> Any:
        raise self._too_late("A merge that reads the model's weights")

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        raise self._too_late("A request for the model's weights")

    def _check_travels(self, what: str, value: Any) -> None:
        if leaves_out_its_block(value):
            return  # it crosses as the number of its block
        try:
            self.sp.departure.pack(value, "it")
        except CannotTravel as why:
            raise self._too_late(what, why) from None

    @staticmethod
    def _too_late(what: str, why: object = "") -> Exception:
        node_id, class_type = comfy_api.executing_node()
        if class_type is None:
            return placed_too_late(what, why=why)
        return placed_too_late(what, f"{class_type} (node {node_id})", gives_model=comfy_api.gives_model(class_type), why=why)


def make_sp_patcher(
    source: comfy.model_patcher.ModelPatcher,
    recipe: Recipe,
    session: WorkerSession,
    devices: tuple[WorkerDevice, ...],
    keep_loaded: str = "auto",
    requested: RequestedDegrees = NOTHING_REQUESTED,
) -> SPModelPatcher:
    """A patched MODEL with the options and the sampling of ``source`` that computes on ``devices``.

    Args:
        source: the MODEL that a node received.
        recipe: how the workers make the same MODEL.
        session: who starts the workers and keeps the model in them.
    """
    local = original(source.get_model_object("diffusion_model"))
    backup = source.object_patches_backup
    own_class = backup.get(CLASS, type(local))
    local_class = source.object_patches.get(CLASS, own_class)
    plan = plan_of(local_class, own_class)
    if not plan.strict and (_FORWARD in source.object_patches or _has_forward(local)):
        # another node's forward stands in the place of the class's, around all of it, and no plan knows what it does
        plan = replace(plan_without(local_class), forward="forward")
    comfy_api.off_the_device(source)
    given = source.model_options.get("transformer_options", {})
    may_read = () if plan.splits_tokens else (WINDOW,)
    known = KnownObjects(given, _has_foreign_code(source), source.get_model_object(MODEL_SAMPLING), may_read)
    departure = Departure(local, known.own)
    outgoing = OutgoingOptions(given, known, departure, written=not plan.splits_tokens)
    sp = RemoteModel(session, recipe, devices, plan, source.model_size(), keep_loaded, requested, departure, outgoing)
    sp.local = local
    sp.device_bytes = device_bytes(plan, local, sp.weight_bytes, requested, len(devices))
    base = _own_base_model(source)
    watch = SwapWatch(local, backup)
    base.diffusion_model = make_stand_in(local, local_class, plan, sp, watch, backup)
    departure.stand_in = weakref.ref(base.diffusion_model)
    if plan.splits_tokens:
        # the ranks share the activations out, so ComfyUI may batch conditionings where one device could not
        base.memory_usage_factor = source.model.memory_usage_factor * largest_part(requested.shares, len(devices))
    # weights on other devices do not count for this process's own
    size = sp.device_bytes if sp.shares(source.load_device) else 1
    patcher = SPModelPatcher(base, source.load_device, source.offload_device, size=size)
    patcher.sp, patcher.watch, patcher.late_callbacks = sp, watch, LateCallbacks(source.callbacks)
    patcher.shares = DeviceShares(sp, source.load_device, source.offload_device)
    _hand_over(source, patcher)
    _watch_whole_runs(patcher)
    return patcher


def _hand_over(source: comfy.model_patcher.ModelPatcher, patcher: SPModelPatcher) -> None:
    """Give ``patcher`` what other nodes put around the model of ``source``, and marks for what they put inside it."""
    options = comfy.utils.deepcopy_list_dict(source.model_options)
    options["transformer_options"] = with_own_patches(options.get("transformer_options", {}))
    patcher.model_options = options
    patcher.own_patches = frozenset(name for name in source.object_patches if _inside_the_model(name))
    patcher.object_patches = {name: value for name, value in source.object_patches.items() if not _inside_the_model(name)}
    for mine, theirs in ((patcher.callbacks, source.callbacks), (patcher.wrappers, source.wrappers)):
        for kind, by_key in theirs.items():
            mine[kind] = {key: list(functions) for key, functions in by_key.items() if key != COMPILE_KEY}
    patcher.attachments = dict(source.attachments)


def _watch_whole_runs(patcher: SPModelPatcher) -> None:
    """Watch from before the first wrapper that another node put around a sampling run, so that its swaps are seen as well."""
    watch = patcher.watch

    def watched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        watch.begin()
        try:
            return executor(*args, **kwargs)
        finally:
            watch.end()

    others = patcher.wrappers.get(WrappersMP.OUTER_SAMPLE, {})
    patcher.wrappers[WrappersMP.OUTER_SAMPLE] = {"sequence_parallel": [watched], **others}


def _ask_workers_to_compile(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands around ``apply_model`` in the place of a compile node's wrapper."""
    asked = plain_wish(executor.class_obj.current_patcher.model_options.get(COMPILE_ARGUMENTS))
    bound = inspect.signature(type(executor.class_obj)._apply_model).bind(executor.class_obj, *args, **kwargs)
    options = {**bound.arguments.get("transformer_options", {}), WISH: asked}
    bound.arguments["transformer_options"] = options
    return executor(*bound.args[1:], **bound.kwargs)


def _own_base_model(source: comfy.model_patcher.ModelPatcher) -> Any:
    """A BaseModel that shares the source's parts but not its identity: what is set on one is not seen on the other.

    All clones of a MODEL share one BaseModel, and ComfyUI leaves in it what the clone that ran last had patched
    (a node of model sampling in another branch). The clones share a backup as well, which has what was there before.
    """
    own = _shallow(source.model)
    for name, before in source.object_patches_backup.items():
        if not _inside_the_model(name):
            _set(own, name, before)
    for name in ("dynamic_vbars", "dynamic_pins"):
        own.__dict__.pop(name, None)
    own.__dict__ |= {
        "model_loaded_weight_memory": 0,
        "lowvram_patch_counter": 0,
        "model_lowvram": False,
        "current_weight_patches_uuid": None,
        "model_offload_buffer_memory": 0,
        "current_patcher": None,
        "device": None,
    }
    return own


def _has_foreign_code(source: comfy.model_patcher.ModelPatcher) -> bool:
    """Another node put code inside this MODEL, as far as its patcher tells."""
    patched = any(_inside_the_model(name) for name in source.object_patches)
    return patched or bool(patches_in(source.model_options.get("transformer_options", {})))


def _inside_the_model(name: str) -> bool:
    """An attribute of a BaseModel that only the workers could honour."""
    return name == "diffusion_model" or name.startswith("diffusion_model.")


def _has_forward(module: Any) -> bool:
    """Somebody gave this module a forward of its own. ComfyUI leaves that of its class there when it takes a patch out."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _shallow(module: Any) -> Any:
    """A copy of a module with the same parts, to which others can be given."""
    own = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        if name in module.__dict__:
            own.__dict__[name] = dict(module.__dict__[name])
    return own


def _set(own: Any, path: str, value: Any) -> None:
    """Set a dotted attribute without touching the parts that ``own`` shares with others."""
    *parents, name = path.split(".")
    for parent in parents:
        part = _shallow(getattr(own, parent))
        setattr(own, parent, part)
        own = part
    setattr(own, name, value)
