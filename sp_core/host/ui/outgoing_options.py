"""The transformer options of a patched MODEL in ComfyUI's process: what crosses to the workers, what stays here, what is refused.

The workers hold everything that was on the MODEL before SP Model Patch, because they made it from the same graph.
Plain data that ComfyUI's process adds for one forward is sent to them. Functions and objects cannot be sent: those that are
used around the model stay in ComfyUI's process, and those that would be used inside it are refused by name.
"""

from __future__ import annotations

from typing import Any

from ...errors import SPError
from ...pool.wire import unsendable
from ..options import AROUND_THE_MODEL, INSIDE_THE_MODEL, name_of, patches_in
from .known_objects import KnownObjects


def without_model_patches(transformer_options: dict[str, Any]) -> dict[str, Any]:
    """The options without patches inside the model. The workers have these, so a patch that appears here later was added later."""
    return {key: value for key, value in transformer_options.items() if key not in INSIDE_THE_MODEL}


def placed_too_late(what: str, node: str = "the node that adds it", *, gives_model: bool = True) -> SPError:
    """The sentence about something that only the workers could honour.

    Args:
        gives_model: ``node`` has a MODEL output. A sampler or a guider has none, and SP Model Patch cannot stand behind it.
    """
    if gives_model:
        return SPError(
            f"{what} was added to the model after SP Model Patch, where only the workers could honour it. "
            f"Place SP Model Patch after {node}, or remove that node"
        )
    return SPError(
        f"{what} is added to the model by {node}, which has no MODEL output for SP Model Patch to stand behind. "
        f"Remove {node}, or SP Model Patch. Guidances that work with it are ComfyUI's own LTXVSpatioTemporalGuidance and "
        "SkipLayerGuidanceDiT"
    )


def hooked(what: str) -> SPError:
    """The sentence about hooks of a conditioning that change the model's weights while it samples."""
    return SPError(
        f"{what} of a conditioning changes the model's weights while sampling, which the workers cannot follow. "
        "Remove the hook from the conditioning and apply its LoRA to the model before SP Model Patch, or remove SP Model Patch"
    )


def refuse_late_patches(transformer_options: dict[str, Any]) -> None:
    """Check the patched MODEL's own options before sampling: what they hold was written by a node behind SP Model Patch.

    Raises:
        SPError: there is a patch inside the model.
    """
    for place, function in patches_in(transformer_options):
        raise placed_too_late(f"A patch ({place}: {name_of(function)})")


def for_workers(transformer_options: dict[str, Any], known: KnownObjects) -> dict[str, Any]:
    """The plain part of one forward's options: what the workers do not have by themselves.

    Raises:
        SPError: a patch inside the model, or an object that the workers do not have, was added for this forward.
    """
    for place, function in patches_in(transformer_options):
        raise SPError(
            f"A patch inside the model ({place}: {name_of(function)}) is added while sampling, which the workers cannot follow. "
            "Remove the node that adds it (a guidance that patches blocks or attention), or SP Model Patch"
        )
    known.check(transformer_options)
    entries = {key: value for key, value in transformer_options.items() if key not in AROUND_THE_MODEL and key not in INSIDE_THE_MODEL}
    return {key: value for key, value in entries.items() if unsendable(value) is None}
