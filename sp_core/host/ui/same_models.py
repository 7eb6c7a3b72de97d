"""The proof that all workers hold the model that ComfyUI's process has."""

from __future__ import annotations

from typing import Any

from ...errors import SPError
from ..model_digest import Part, difference, from_plain
from .recipe import Recipe


def check_same_models(recipe: Recipe, by_rank: list[list[Any]]) -> None:
    """Compare the MODELs along a recipe, beginning at the loader.

    Args:
        by_rank: the workers' digests of each of ``recipe.models``, in its order; None where a worker has no result.

    Raises:
        SPError: a node made another MODEL in some workers; the first such node is named.
    """
    for number, ((node, _), mine) in enumerate(recipe.models.items()):
        found = {rank: what for rank, theirs in enumerate(by_rank) if (what := _difference(mine, theirs[number])) is not None}
        if found:
            ranks = ("rank " if len(found) == 1 else "ranks ") + ", ".join(map(str, found))
            raise SPError(
                f"{recipe.origin[node]} made another model in the workers ({ranks}) than in ComfyUI's process: "
                f"{next(iter(found.values()))}. What it makes depends on the process: on the clock, a file, free memory or a random "
                "number. Remove this node, or SP Model Patch"
            )


def _difference(mine: list[dict[str, Part]], theirs: list[dict[str, Any]] | None) -> str | None:
    if theirs is None:
        return None
    if len(mine) != len(theirs):
        return f"a list of {len(theirs)} models instead of {len(mine)}"
    found = (difference(here, from_plain(there)) for here, there in zip(mine, theirs, strict=True))
    return next((what for what in found if what is not None), None)
