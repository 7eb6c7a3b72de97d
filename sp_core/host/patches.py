"""Patches that run inside the model, in the workers: which of them work on a part of the tokens.

Three kinds do: attention functions (they get whole tokens of some heads), patches between
blocks (the engine gathers the tokens for them), and functions that were read and tested
(:data:`KNOWN`). Everything else is refused by name. ``docs/patches.md`` is the table for users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import SPError
from ..plans import SequencePlan
from ..plans.override import OVERRIDE
from .options import name_of, patches_in

#: (name, kind, number) of the blocks that a call leaves out, in the options that travel
SKIPPED = "sp_skipped_blocks"


@dataclass(frozen=True)
class Known:
    """A function that treats each token by itself."""

    place: str
    name: str
    #: it compares the conditionings of a batch, so these must not be shared out among the ranks
    whole_batch: bool = False


KNOWN = (Known("patches.attn1_output_patch", "NAGuidance.execute.<locals>.nag_attention_output_patch of nodes_nag", whole_batch=True),)


def check_patches(patcher: Any, plan: SequencePlan) -> None:
    """Refuse what would see a part of the tokens and may not know it.

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
    """Some patch compares conditionings."""
    found = patches_in(patcher.model_options.get("transformer_options", {}))
    return any(known.whole_batch for place, function in found if (known := _known(place, function)) is not None)


def _known(place: str, function: Any) -> Known | None:
    return next((known for known in KNOWN if known.place == place and known.name == name_of(function)), None)


# -- blocks that a guidance leaves out for one forward ------------------------------------------


class _Sealed(dict):
    """Arguments that nobody may look into."""

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        raise LookupError

    __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = __bool__ = __or__ = _read  # type: ignore[assignment]
    get = keys = items = values = copy = pop = update = setdefault = _read  # type: ignore[assignment]


def leaves_out_its_block(function: Any) -> bool:
    """A block replacement that gives back what it got, without a look at it: the block is skipped, whatever it holds."""
    arguments = _Sealed()
    try:
        return function(arguments, _Sealed()) is arguments
    except Exception:
        return False


def take_skips(transformer_options: dict[str, Any]) -> tuple[dict[str, Any], list[list[Any]]]:
    """The options without their block skips, and these as plain data."""
    replaced = transformer_options.get("patches_replace") or {}
    skips = [
        [name, *place]
        for name, places in replaced.items()
        for place, function in places.items()
        if isinstance(place, tuple) and leaves_out_its_block(function)
    ]
    if not skips:
        return transformer_options, []
    taken = {(name, tuple(place)) for name, *place in skips}
    rest = {name: {p: f for p, f in places.items() if (name, p) not in taken} for name, places in replaced.items()}
    return {**transformer_options, "patches_replace": rest}, skips


def put_skips(options: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the skips as the replacements that they were."""
    skips = options.pop(SKIPPED, None) or []
    replaced = {name: dict(places) for name, places in (options.get("patches_replace") or {}).items()}
    for name, *place in skips:
        replaced.setdefault(name, {})[tuple(place)] = _skip
    return {**options, "patches_replace": replaced} if skips else options


def _skip(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    return arguments
