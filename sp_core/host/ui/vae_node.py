"""What SP VAE Patch does."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from ...errors import SPError
from ...pool.devices import WorkerDevice
from ...vae import PLANS, architecture_of, plan_for, why_not
from .. import comfy_api
from ..vae_digest import vae_digest
from .device_input import several_devices
from .device_memory import DeviceShares
from .patcher import SPModelPatcher
from .recipe import Recipe
from .remote_vae import RemoteVae, Results
from .session import session
from .vae_module import make_stand_in_vae
from .vae_only_tiles import OnlyTiles, has_tiles, make_tiles_vae
from .vae_tiles import with_spread_tiles
from .watch import VaeWatch
from .wire_recipe import recipe_of_input, register

log = logging.getLogger(__name__)


class SPVaePatcher(SPModelPatcher):
    """The ModelPatcher of a shared-out VAE: ComfyUI manages the memory that its weights take in the workers."""

    watch: Any = None
    late_callbacks: Any = None
    own_patches = frozenset()

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        """Leave the weights: ComfyUI would unpatch the modules that it finds below the stand-in, which other branches share."""
        super().unpatch_model(device_to, unpatch_weights=False)

    def add_object_patch(self, name: str, obj: Any) -> None:
        raise self._too_late(f"An object patch of {name}")

    @staticmethod
    def _too_late(what: str, why: object = "") -> Exception:
        return SPError(
            f"{what} was added to the VAE behind SP VAE Patch, where it has no effect on the workers. "
            "Place SP VAE Patch behind the node that adds it, or remove SP VAE Patch"
        )


def supported_vaes() -> list[str]:
    """The VAEs that can run on several devices, by the names that people know them by."""
    return [plan.title for plan in PLANS.values()]


def patch_vae(vae: Any, devices: str, dynprompt: Any, unique_id: str) -> Any:
    """A VAE that computes on ``devices``, or only its tiles where there is no plan for it; the given one where there is one device.

    Args:
        vae: a VAE of ComfyUI, which came to the node ``unique_id`` over a wire.
        dynprompt: the prompt that ComfyUI runs; the workers replay the part of it that leads to ``vae``.

    Raises:
        SPError: the VAE is shared out over other devices already, or its graph cannot be replayed.
        ValueError: ``devices`` names none that exist.
    """
    chosen = several_devices(devices, "VAE")
    if chosen is None:
        return vae
    if (already := _devices_of(vae)) is not None:
        if already == chosen:
            return vae
        raise SPError("The VAE was patched by another SP VAE Patch with other devices; keep one of the two")
    if getattr(getattr(vae, "device", None), "type", None) == "cpu" and chosen[0].kind != "cpu":
        log.info("SP: ComfyUI computes VAEs on the CPU (--cpu-vae); the VAE stays as it is")
        return vae
    module: Any = getattr(vae, "first_stage_model", None)
    if lacks := _lacks(vae, module):
        return _with_tiles_only(vae, lacks, chosen, dynprompt, unique_id)
    shared = make_sp_vae(vae, recipe_of_input(dynprompt, unique_id, "vae"), chosen)
    register(shared.patcher.sp, dynprompt)
    return shared


def _devices_of(vae: Any) -> tuple[WorkerDevice, ...] | None:
    """The devices that another SP VAE Patch has shared ``vae`` out over; None where none has."""
    if isinstance(vae, OnlyTiles):
        return vae.sp_tiles.remote.devices
    patcher = getattr(vae, "patcher", None)
    return patcher.sp.devices if isinstance(patcher, SPVaePatcher) else None


def _lacks(vae: Any, module: Any) -> str | None:
    """Why there is no decode plan for a VAE, for people; None where there is one that fits."""
    plan = plan_for(module)
    if plan is None:
        return f"{architecture_of(vae if module is None else module)} has no decode plan"
    problem = why_not(plan, module)
    return f"the decode plan of {plan.title} does not fit this VAE in ComfyUI {comfy_api.version()}: {problem}" if problem else None


def _with_tiles_only(vae: Any, lacks: str, devices: tuple[WorkerDevice, ...], dynprompt: Any, unique_id: str) -> Any:
    """A VAE without a decode plan: one that spreads its tiles, or the given one where that cannot be."""
    if not has_tiles(vae):
        log.info("SP: %s; the VAE stays as it is", lacks)
        return vae
    try:
        shared = make_tiles_vae(vae, recipe_of_input(dynprompt, unique_id, "vae"), devices)
    except SPError as error:
        log.info("SP: %s, and its tiles cannot be shared out: %s; the VAE stays as it is", lacks, error)
        return vae
    register(shared.sp_tiles.remote, dynprompt)
    log.info("SP: %s; each of %d devices computes tiles where they are asked for, and one device all else", lacks, len(devices))
    return shared


def make_sp_vae(vae: Any, recipe: Recipe, devices: tuple[WorkerDevice, ...]) -> Any:
    """A copy of ``vae`` with everything of its own but the module that computes, and the patcher that holds that."""
    local, source = vae.first_stage_model, vae.patcher
    plan = plan_for(local)
    assert plan is not None
    # a class that joins its tiles by itself does so on the VAE's device
    inside = bool(plan.tiles)
    results = Results(vae.device, vae.vae_dtype) if inside else Results(vae.output_device, vae.vae_output_dtype())
    # a device of another kind may take another dtype
    digest = vae_digest(vae) if source.load_device.type == devices[0].kind else None
    remote = RemoteVae(session(), recipe, devices, plan, source.model_size(), results, digest)
    shared = copy.copy(vae)
    shared.first_stage_model = make_stand_in_vae(local, plan, remote, VaeWatch(local, source))
    # ComfyUI manages the memory of this process's device only, so weights on other devices do not count
    size = source.model_size() if remote.shares(source.load_device) else 1
    shared.patcher = SPVaePatcher(shared.first_stage_model, source.load_device, source.offload_device, size=size)
    shared.patcher.sp = remote
    shared.patcher.shares = DeviceShares(remote, source.load_device, source.offload_device)
    if not getattr(vae, "handles_tiling", False):
        with_spread_tiles(shared)
    # each device computes a band
    shared.memory_used_decode = _shared_out(vae.memory_used_decode, len(devices))
    shared.memory_used_encode = _shared_out(vae.memory_used_encode, len(devices))
    return shared


def _shared_out(estimate: Callable[..., float], ranks: int) -> Callable[..., float]:
    return lambda *args, **kwargs: estimate(*args, **kwargs) / ranks
