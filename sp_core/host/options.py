"""Transformer options: what crosses to the workers, what stays, what is refused.

The workers hold everything that was on the MODEL before SP Model Patch, because they
made it from the same graph. Plain data that the UI process adds for each call is sent.
Functions cannot be sent: those that run around the model (wrappers, callbacks) run in the
UI process; those that would run inside it are refused by name.
"""

from __future__ import annotations

from typing import Any

from ..errors import SPError
from ..plans.override import OVERRIDE
from ..pool.errors import WireError
from ..pool.wire import encode

#: only the diffusion model's own code reads these
INSIDE_THE_MODEL = ("patches", "patches_replace", OVERRIDE)
#: run in the UI process, around the model
AROUND_THE_MODEL = ("wrappers", "callbacks")


def without_model_patches(transformer_options: dict[str, Any]) -> dict[str, Any]:
    """Options for the UI side of a patched MODEL: the workers have the patches, so whatever appears later was added later."""
    return {key: value for key, value in transformer_options.items() if key not in INSIDE_THE_MODEL}


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
    return found


def placed_too_late(what: str, node: str) -> SPError:
    return SPError(
        f"{what} was added to the model after SP Model Patch, where only the workers could honour it. Place SP Model Patch after {node}"
    )


def refuse_late_patches(transformer_options: dict[str, Any]) -> None:
    """Before sampling: what the patched MODEL's own options hold was written there by a node behind SP Model Patch.

    Raises:
        SPError: there is a patch inside the model.
    """
    for place, function in patches_in(transformer_options):
        raise placed_too_late(f"A patch ({place}: {name_of(function)})", "the node that adds it")


def for_workers(transformer_options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The plain part of one call's options, and the names of the objects that stay here.

    Raises:
        SPError: a patch inside the model was added for this call.
    """
    for place, function in patches_in(transformer_options):
        raise SPError(
            f"A patch inside the model ({place}: {name_of(function)}) is added while sampling, which the workers cannot follow. "
            "Remove the node that adds it (a guidance that patches blocks or attention), or SP Model Patch"
        )
    plain: dict[str, Any] = {}
    kept_here: list[str] = []
    for key, value in transformer_options.items():
        if key in AROUND_THE_MODEL or key in INSIDE_THE_MODEL:
            continue
        try:
            encode(value)
        except WireError:
            kept_here.append(key)
        else:
            plain[key] = value
    return plain, kept_here
