"""What SP Model Patch does."""

from __future__ import annotations

import logging
from typing import Any

from ...errors import SPError
from ...planner.degrees import NOTHING_REQUESTED, RequestedDegrees, check_requested
from ...plans import titles
from .. import comfy_api
from ..model_digest import model_digest
from .computed_values import AboutModels, ComputedValues
from .device_input import check_devices, named_devices, why_not_together
from .patcher import SPModelPatcher, make_sp_patcher
from .recipe import is_link, names_of_loaders, trace
from .session import session
from .unchanged_model import same_but_for_weights, same_for_workers

log = logging.getLogger(__name__)

#: when the workers' weights leave the devices
KEEP_LOADED = ("auto", "always", "never")


def supported_models() -> list[str]:
    """The models that can run on several devices, by the names that people know them by."""
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
    """A MODEL that computes on ``devices``; the given one when there is only one device.

    Args:
        model: a MODEL of ComfyUI, which came to the node ``unique_id`` over a wire.
        dynprompt: the prompt that ComfyUI runs; the workers replay the part of it that leads to ``model``.

    Raises:
        SPError: no plan for the architecture, the model did not come over a wire, or an input has a value that does not exist.
        ValueError: ``devices`` names none that exist.
    """
    if keep_loaded not in KEEP_LOADED:  # ComfyUI does not compare what comes over a wire with the list
        raise SPError(f"'{keep_loaded}' is no value for keep_loaded; there are {', '.join(KEEP_LOADED)}")
    chosen = named_devices(devices)
    if len(chosen) < 2:
        why = f"one device ({chosen[0]}) is nothing to share" if chosen else "no accelerator is visible"
        log.info("SP: %s; the model stays as it is", why)
        return model
    if problem := why_not_together(chosen):
        raise SPError(problem)
    if isinstance(model, SPModelPatcher):
        if (model.sp.devices, model.sp.requested, model.sp.keep_loaded) == (chosen, requested, keep_loaded):
            return model
        what = "settings" if model.sp.devices == chosen else "devices"
        raise SPError(f"The model was patched by another SP Model Patch with other {what}; keep one of the two")
    check_requested(requested, len(chosen))
    link = dynprompt.get_node(unique_id)["inputs"].get("model")
    computed = ComputedValues(comfy_api.outputs_so_far(), AboutModels(same_for_workers, same_but_for_weights, model_digest))
    recipe = trace(dynprompt.get_node, link, computed, _list_index(computed, link), comfy_api.output_types)
    patched = make_sp_patcher(model, recipe, session(), chosen, keep_loaded, requested)
    session().register(patched.sp, names_of_loaders(map(dynprompt.get_node, dynprompt.all_node_ids())))
    return patched


def _list_index(computed: ComputedValues, link: Any) -> int | None:
    """Which member of the list on the wire ``link`` this call of the node got: the last one where another input has more."""
    members, index = computed.members(link) if is_link(link) else None, comfy_api.executing_list_index()
    return index if index is None or members is None else min(index, len(members) - 1)
