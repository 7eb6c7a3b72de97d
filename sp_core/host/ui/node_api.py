"""What the nodes call."""

from __future__ import annotations

import logging
import platform
from typing import Any

from ...errors import SPError
from ...planner.degrees import NOTHING_REQUESTED, RequestedDegrees, check_requested
from ...plans import titles
from ...pool.devices import WorkerDevice, accelerators, maker, parse_devices, platform_problem
from .recipe import trace

log = logging.getLogger(__name__)


def check_devices(devices: str) -> bool | str:
    """True, or why the string names no devices that exist and can work together."""
    try:
        chosen = parse_devices(devices, *accelerators())
    except ValueError as error:
        return str(error)
    return _problem(chosen) or True


def _problem(chosen: tuple[WorkerDevice, ...]) -> str | None:
    """Why these devices cannot work together on this system. One alone is never a problem: it is not used."""
    return platform_problem(platform.system(), maker(chosen[0].kind)) if len(chosen) > 1 else None


def sampler_choices() -> tuple[list[str], list[str]]:
    """Sampler and scheduler names of the host."""
    import comfy.samplers

    return list(comfy.samplers.KSampler.SAMPLERS), list(comfy.samplers.KSampler.SCHEDULERS)


def supported_models() -> list[str]:
    """The models that can run on several devices, by the names that people know them by."""
    return titles()


KEEP_LOADED = ("auto", "always", "never")
#: what SP Release gives back
RELEASES = ("weights", "workers")


def check_layout(devices: str, requested: RequestedDegrees) -> bool | str:
    """True, or why the pinned layout cannot be laid over the devices."""
    usable = check_devices(devices)
    if usable is not True:
        return usable
    try:
        # without an accelerator `auto` names none, and the model is returned unchanged as with one
        check_requested(requested, max(1, len(parse_devices(devices, *accelerators()))))
    except SPError as error:
        return str(error)
    return True


def patch_model(
    model: Any, devices: str, dynprompt: Any, unique_id: str, keep_loaded: str = "auto", requested: RequestedDegrees = NOTHING_REQUESTED
) -> Any:
    """A MODEL that computes on ``devices``; the given one when there is only one device.

    Raises:
        SPError: no plan for the architecture, or the model did not come over a wire.
        ValueError: ``devices`` names none that exist.
    """
    from .patcher import SPModelPatcher, make_sp_patcher

    chosen = parse_devices(devices, *accelerators())
    if len(chosen) < 2:
        log.info("SP: %s; the model stays as it is", _one_device(chosen))
        return model
    if problem := _problem(chosen):
        raise SPError(problem)
    if isinstance(model, SPModelPatcher):
        if (model.sp.devices, model.sp.requested, model.sp.keep_loaded) == (chosen, requested, keep_loaded):
            return model
        what = "settings" if model.sp.devices == chosen else "devices"
        raise SPError(f"The model was patched by another SP Model Patch with other {what}; keep one of the two")
    check_requested(requested, len(chosen))
    link = dynprompt.get_node(unique_id)["inputs"].get("model")
    return make_sp_patcher(model, trace(dynprompt.get_node, link), chosen, keep_loaded, requested)


def _one_device(devices: tuple[WorkerDevice, ...]) -> str:
    return f"one device ({devices[0]}) is nothing to share" if devices else "no accelerator is visible"


def sample(model: Any, devices: str, dynprompt: Any, unique_id: str, arguments: dict[str, Any]) -> tuple[Any, str]:
    """KSampler's work on ``devices``: (latent, report)."""
    import nodes

    from .patcher import SPModelPatcher
    from .report import report

    patched = model if isinstance(model, SPModelPatcher) else _patched_before(model, devices, dynprompt, unique_id)
    order = ("seed", "steps", "cfg", "sampler_name", "scheduler", "positive", "negative", "latent")
    latent = nodes.common_ksampler(patched, *(arguments[name] for name in order), denoise=arguments["denoise"])[0]
    return latent, report(patched)


def _patched_before(model: Any, devices: str, dynprompt: Any, unique_id: str) -> Any:
    """The MODEL that an earlier run made of this one, or a new one.

    The host keeps ``model`` as long as nothing above it changed, and this with it. A new one
    each time would leave with its run, and the workers would have to load it again.
    """
    from .session import session

    chosen, before = parse_devices(devices, *accelerators()), session().patched
    patched = before.get(model)
    if patched is None or patched.sp.devices != chosen:
        patched = patch_model(model, devices, dynprompt, unique_id)
        if patched is not model:
            before[model] = patched
    return patched


def release(what: str) -> str:
    """Give the devices back: ``weights`` or ``workers``. Says what was given back; nothing to give back is no error.

    Raises:
        ValueError: ``what`` is neither.
    """
    from .report import size
    from .session import session

    if what not in RELEASES:
        raise ValueError(f"'{what}' cannot be released; there are {', '.join(RELEASES)}")
    current = session()
    pool = current.pool
    if pool is None or pool.over:
        return "No workers are running."
    if what == "workers":
        current.close()
        return f"Ended {pool.world_size} workers."
    return f"{size(current.release_all())} of weights taken off {pool.world_size} devices; the workers stay."
