"""Patches that run inside the model, in the workers: which of them work on a part of the tokens.

Three kinds do: attention functions (they get all tokens of some heads), patches between
blocks (the engine gathers the tokens for them), and functions that were read and tested
(:data:`KNOWN`). Everything else is refused by name. ``docs/patches.md`` is the table for users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import SPError
from ...plans import SequencePlan
from ...plans.override import OVERRIDE
from ..options import name_of, patches_in


@dataclass(frozen=True)
class Known:
    """A function that treats each token by itself."""

    place: str
    name: str
    #: the function compares the conditionings of a batch, so these must not be shared out among the ranks
    whole_batch: bool = False


KNOWN = (Known("patches.attn1_output_patch", "NAGuidance.execute.<locals>.nag_attention_output_patch of nodes_nag", whole_batch=True),)


def check_patches(patcher: Any, plan: SequencePlan) -> None:
    """Refuse a patch that would see a part of the tokens and may not be written for that.

    Raises:
        SPError: names the patch and where it sits.
    """
    between = {f"patches.{kind}" for kind in plan.between}
    for place, function in patches_in(patcher.model_options.get("transformer_options", {})):
        if place != OVERRIDE and place not in between and _known(place, function) is None:
            raise SPError(
                f"a patch inside the model ({place}: {name_of(function)}) is not known to work on a part of the tokens; "
                "remove the node that adds it"
            )
    model: nn.Module = patcher.model.diffusion_model
    for path, function in patcher.object_patches.items():
        parent, _, name = path.rpartition(".")
        if parent == "diffusion_model" and callable(getattr(type(model), name, None)):
            raise SPError(
                f"the model's own {name} is replaced ({name_of(function)}), which then computes on a part of the tokens; "
                "remove the node that replaces it"
            )


def wants_whole_batch(patcher: Any) -> bool:
    """Some patch compares conditionings, so every rank needs all of them."""
    found = patches_in(patcher.model_options.get("transformer_options", {}))
    return any(known.whole_batch for place, function in found if (known := _known(place, function)) is not None)


def _known(place: str, function: Any) -> Known | None:
    return next((known for known in KNOWN if known.place == place and known.name == name_of(function)), None)
