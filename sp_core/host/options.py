"""Transformer options, as ComfyUI's process and the workers both read them: which entries run where, and which are patches."""

from __future__ import annotations

from typing import Any

from ..plans.override import OVERRIDE

#: forwards of modules that nodes behind SP Model Patch replace: "diffusion_model.blocks.0.ffn.forward" -> function
LATE_FORWARDS = "sp_late_forwards"
#: the path of an object patch that gives the model another class
CLASS = "diffusion_model.__class__"
#: only the diffusion model's own code reads these entries
INSIDE_THE_MODEL = ("patches", "patches_replace", OVERRIDE, LATE_FORWARDS)
#: these entries run in ComfyUI's process, around the model
AROUND_THE_MODEL = ("wrappers", "callbacks")
#: the context window of a forward, an object of ComfyUI's own. No model with a plan looks for it; WanAnimate2 does, as of 0.33
WINDOW = "context_window"
#: these hold objects of ComfyUI's own (as of 0.33) that only code around the model reads: the holder of EasyCache and LazyCache,
#: and of models with a plan the context window
READ_AROUND_THE_MODEL = ("easycache", WINDOW)
#: the part of a MODEL that says what a sigma is. Samplers of packs put it into the options by this name
MODEL_SAMPLING = "model_sampling"


def name_of(function: Any) -> str:
    """Module and name of a patch, for messages."""
    target = getattr(function, "__func__", function)
    if not hasattr(target, "__qualname__"):
        target = type(function)
    module = getattr(target, "__module__", "") or ""
    return f"{target.__qualname__} of {module.rsplit('/', 1)[-1]}"


def patches_in(transformer_options: dict[str, Any]) -> list[tuple[str, Any]]:
    """(place, function) of everything that would run inside the model."""
    found: list[tuple[str, Any]] = []
    for kind, functions in (transformer_options.get("patches") or {}).items():
        found += [(f"patches.{kind}", function) for function in functions]
    for kind, by_place in (transformer_options.get("patches_replace") or {}).items():
        found += [(f"patches_replace.{kind}.{place}", function) for place, function in by_place.items()]
    override = transformer_options.get(OVERRIDE)
    if override is not None:
        found.append((OVERRIDE, override))
    late = transformer_options.get(LATE_FORWARDS) or {}
    return found + [(path.removeprefix("diffusion_model."), function) for path, function in late.items()]
