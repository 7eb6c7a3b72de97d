"""What SP Sampler does."""

from __future__ import annotations

from typing import Any

from ...planner.degrees import RequestedDegrees
from .device_input import named_devices
from .patch_node import patch_model
from .patcher import SPModelPatcher
from .report import report
from .session import session


def sampler_choices() -> tuple[list[str], list[str]]:
    """ComfyUI's names of samplers and schedulers."""
    import comfy.samplers

    return list(comfy.samplers.KSampler.SAMPLERS), list(comfy.samplers.KSampler.SCHEDULERS)


def sample(model: Any, devices: str, dynprompt: Any, unique_id: str, arguments: dict[str, Any], weights: str = "auto") -> tuple[Any, str]:
    """KSampler's work on ``devices``: (LATENT, report).

    Args:
        model: a MODEL, patched by SP Model Patch or not.
        arguments: KSampler's other inputs, by name.
        weights: how they lie on the devices, see SP Model Patch.

    Raises:
        SPError: as :func:`patch_model` does.
    """
    import nodes

    requested = RequestedDegrees(weights=weights)
    patched = model if isinstance(model, SPModelPatcher) else _patch_once(model, devices, dynprompt, unique_id, requested)
    order = ("seed", "steps", "cfg", "sampler_name", "scheduler", "positive", "negative", "latent")
    latent = nodes.common_ksampler(patched, *(arguments[name] for name in order), denoise=arguments["denoise"])[0]
    return latent, report(patched)


def _patch_once(model: Any, devices: str, dynprompt: Any, unique_id: str, requested: RequestedDegrees) -> Any:
    """The patched MODEL that an earlier sampling run made of this one, or a new one.

    ComfyUI keeps ``model`` as long as nothing above it in the graph changes, and the session keeps the patched one as long.
    A patched MODEL that is made for each sampling run would end with it, and the workers would have to load it again.
    """
    by_model = session().patched_by_sampler
    patched = by_model.get(model)
    if patched is None or (patched.sp.devices, patched.sp.requested) != (named_devices(devices), requested):
        patched = patch_model(model, devices, dynprompt, unique_id, requested=requested)
        if patched is not model:
            by_model[model] = patched
    return patched
