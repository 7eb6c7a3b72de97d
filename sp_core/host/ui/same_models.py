"""The proof that all workers hold the same model."""

from __future__ import annotations

from typing import Any

from ...errors import SPError
from ..model_digest import difference, from_plain
from .recipe import Recipe


def check_same_models(recipe: Recipe, by_rank: list[list[Any]]) -> None:
    """Compare the MODELs along a recipe over the ranks, beginning at the loader.

    ComfyUI's process is compared too where the recipe leaves something out and has a fallback: a difference there costs
    another load. Elsewhere it is not, for ComfyUI may change what it holds between two looks: other branches share it.

    Args:
        by_rank: the workers' digests of each of ``recipe.models``, in its order; None where a worker has no result.

    Raises:
        SPError: a node made different MODELs; the first such node is named.
    """
    for number, ((node, _), ours) in enumerate(recipe.models.items()):
        digests = [None if theirs[number] is None else [from_plain(plain) for plain in theirs[number]] for theirs in by_rank]
        first = ours if recipe.fallback is not None else next((digest for digest in digests if digest is not None), None)
        found = {rank: what for rank, digest in enumerate(digests) if (what := _difference(first, digest)) is not None}
        if found:
            ranks = ("rank " if len(found) == 1 else "ranks ") + ", ".join(map(str, found))
            raise SPError(
                f"{recipe.origin[node]} made another model in the worker of {ranks} than elsewhere: "
                f"{next(iter(found.values()))}. What it makes depends on the process: on the clock, a file, free memory or a random "
                "number. Remove this node, or SP Model Patch"
            )


def _difference(first: list[Any] | None, other: list[Any] | None) -> str | None:
    if first is None or other is None:
        return None
    if len(first) != len(other):
        return f"a list of {len(other)} models instead of {len(first)}"
    found = (difference(a, b) for a, b in zip(first, other, strict=True))
    return next((what for what in found if what is not None), None)
