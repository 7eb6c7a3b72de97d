"""The transformer options of a patched MODEL in ComfyUI's process: what crosses to the workers, what stays here, what is refused.

The workers hold everything that was on the MODEL before SP Model Patch, because they made it from the same graph.
Plain data that ComfyUI's process adds for one forward is sent to them. Functions cannot be sent: those that run around the
model (wrappers, callbacks) run in ComfyUI's process, and those that would run inside it are refused by name.
"""

from __future__ import annotations

from typing import Any

from ...errors import SPError
from ...pool.wire import unsendable
from ..options import AROUND_THE_MODEL, INSIDE_THE_MODEL, name_of, patches_in


def without_model_patches(transformer_options: dict[str, Any]) -> dict[str, Any]:
    """The options without patches inside the model. The workers have these, so a patch that appears here later was added later."""
    return {key: value for key, value in transformer_options.items() if key not in INSIDE_THE_MODEL}


def placed_too_late(what: str, node: str) -> SPError:
    return SPError(
        f"{what} was added to the model after SP Model Patch, where only the workers could honour it. Place SP Model Patch after {node}"
    )


def refuse_late_patches(transformer_options: dict[str, Any]) -> None:
    """Check the patched MODEL's own options before sampling: what they hold was written by a node behind SP Model Patch.

    Raises:
        SPError: there is a patch inside the model.
    """
    for place, function in patches_in(transformer_options):
        raise placed_too_late(f"A patch ({place}: {name_of(function)})", "the node that adds it")


def for_workers(transformer_options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The plain part of one forward's options, and the names of the objects that stay in this process.

    Raises:
        SPError: a patch inside the model was added for this forward.
    """
    for place, function in patches_in(transformer_options):
        raise SPError(
            f"A patch inside the model ({place}: {name_of(function)}) is added while sampling, which the workers cannot follow. "
            "Remove the node that adds it (a guidance that patches blocks or attention), or SP Model Patch"
        )
    entries = {key: value for key, value in transformer_options.items() if key not in AROUND_THE_MODEL and key not in INSIDE_THE_MODEL}
    kept_here = [key for key, value in entries.items() if unsendable(value) is not None]
    return {key: value for key, value in entries.items() if key not in kept_here}, kept_here
