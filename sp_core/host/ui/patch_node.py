"""What SP Model Patch does."""

from __future__ import annotations

import logging
from typing import Any

from ...errors import SPError
from ...planner.degrees import NOTHING_REQUESTED, RequestedDegrees, check_requested
from ...plans import NOT_SAMPLED, titles
from .device_input import check_devices, named_devices, several_devices
from .patcher import SPModelPatcher, make_sp_patcher
from .session import session
from .wire_recipe import recipe_of_input, register

log = logging.getLogger(__name__)

#: when the workers' weights leave the devices
KEEP_LOADED = ("auto", "always", "never")


def supported_models() -> list[str]:
    """The models whose tokens can be shared out, by the names that people know them by."""
    return titles()


def check_degrees(devices: str | None, requested: RequestedDegrees) -> bool | str:
    """True, or the sentence that says why the requested degrees do not fit the devices.

    Args:
        devices: None where they are not known yet.
        requested: a degree that is not known yet is left to the planner: what does not fit without it does not fit with any.
    """
    if devices is None:
        return True
    usable = check_devices(devices)
    if usable is not True:
        return usable
    try:
        # without an accelerator `auto` names no device, and the model is returned unchanged, as with one device
        check_requested(requested, max(1, len(named_devices(devices))))
    except SPError as error:
        return str(error)
    return True


def patch_model(
    model: Any, devices: str, dynprompt: Any, unique_id: str, keep_loaded: str = "auto", requested: RequestedDegrees = NOTHING_REQUESTED
) -> Any:
    """A MODEL that computes on ``devices``; the given one when there is only one device, and where nothing samples the model.

    Args:
        model: a MODEL of ComfyUI, which came to the node ``unique_id`` over a wire.
        dynprompt: the prompt that ComfyUI runs; the workers replay the part of it that leads to ``model``.

    Raises:
        SPError: the model did not come over a wire, or an input has a value that does not exist.
        ValueError: ``devices`` names none that exist.
    """
    if keep_loaded not in KEEP_LOADED:  # ComfyUI does not compare what comes over a wire with the list
        raise SPError(f"'{keep_loaded}' is no value for keep_loaded; there are {', '.join(KEEP_LOADED)}")
    chosen = several_devices(devices, "model")
    if chosen is None:
        return model
    if isinstance(model, SPModelPatcher):
        if (model.sp.devices, model.sp.requested, model.sp.keep_loaded) == (chosen, requested, keep_loaded):
            return model
        what = "settings" if model.sp.devices == chosen else "devices"
        raise SPError(f"The model was patched by another SP Model Patch with other {what}; keep one of the two")
    check_requested(requested, len(chosen))
    if (kind := type(model.model.diffusion_model).__name__) in NOT_SAMPLED:
        log.info("SP Model Patch: nothing samples %s; the model stays as it is, on one device", kind)
        return model
    recipe = recipe_of_input(dynprompt, unique_id, "model")
    patched = make_sp_patcher(model, recipe, session(), chosen, keep_loaded, requested)
    register(patched.sp, dynprompt)
    return patched
