"""Code of other node packs inside the model, in the workers: what there is, and what it may be trusted to keep apart.

A function can treat heads, tokens and rows of the batch apart from one another, or mix them. :data:`KNOWN` lists
functions that were read and tested. ``docs/patches.md`` is the table for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import SPError
from ...plans import SequencePlan
from ...plans.override import OVERRIDE
from ..options import name_of, patches_in

_INSIDE = "diffusion_model."


@dataclass(frozen=True)
class Known:
    """A function that was read, by the place where it sits and the name that :func:`name_of` gives it."""

    place: str
    #: qualified name of the function
    name: str
    #: what its module's name ends in, as packs lie in folders of any name
    module: str
    #: each token comes out the same whatever the other tokens are; of an attention function each head
    parts_apart: bool = True
    #: each row of the batch comes out the same whatever the other rows are
    rows_apart: bool = False


KNOWN = (
    # compares cond and uncond
    Known("patches.attn1_output_patch", "NAGuidance.execute.<locals>.nag_attention_output_patch", "nodes_nag"),
    # KJNodes: an attention kernel
    Known(OVERRIDE, "PathchSageAttentionKJ.patch.<locals>.attention_override_sage", ".model_optimization_nodes", rows_apart=True),
)


@dataclass(frozen=True)
class ForeignCode:
    """A function of another pack that runs inside the model."""

    #: "patches.attn1_patch", "blocks.0.ffn.forward", ...
    place: str
    #: module and name of the function
    name: str
    known: Known | None = None


def foreign_code(patcher: Any, options: Mapping[str, Any] | None = None) -> list[ForeignCode]:
    """All code of other packs inside a model: in its options and those of a call, and in the place of its modules and their forwards."""
    found = patches_in(patcher.model_options.get("transformer_options", {})) + patches_in(dict(options or {}))
    inside = {path.removeprefix(_INSIDE): value for path, value in patcher.object_patches.items() if path.startswith(_INSIDE)}
    found += [(path, value) for path, value in inside.items() if callable(value)]
    return [ForeignCode(place, name_of(function), _known(place, function)) for place, function in found]


def wants_whole_batch(patcher: Any, options: Mapping[str, Any] | None = None) -> bool:
    """Some code inside the model may tell the rows of the batch, so every rank needs all of them."""
    return any(code.known is None or not code.known.rows_apart for code in foreign_code(patcher, options))


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


def _known(place: str, function: Any) -> Known | None:
    name, _, module = name_of(function).partition(" of ")
    return next((known for known in KNOWN if known.place == place and known.name == name and module.endswith(known.module)), None)
