"""The proof that all workers hold the same model, and the same VAE, as far as their digests tell.

:mod:`..model_digest` and :mod:`..vae_digest` say what these cover: values by samples.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ...errors import SPError
from .. import vae_digest
from ..model_digest import PARTS, VALUES, WEIGHT_PATCHES, difference, from_plain
from .recipe import Recipe

#: what no other branch can change in a MODEL: patches, and what a file has put under them
OWN = (WEIGHT_PATCHES, VALUES)
SHARED = tuple(part for part in PARTS if part not in OWN)


def check_same_models(recipe: Recipe, by_rank: list[list[Any]]) -> None:
    """Compare the MODELs along a recipe over the ranks, beginning at the loader.

    ComfyUI's process is compared too. Its patches of weights belong to one MODEL, and most values under them to a file. The
    rest of what it holds may change between two looks, for other branches share it. So the rest counts only where the recipe
    leaves something out and has a fallback: a difference there costs another load.

    Args:
        by_rank: the workers' digests of each of ``recipe.models``, in its order; None where a worker has no result.

    Raises:
        SPError: a node made different MODELs; the first such node is named.
    """
    for number, ((node, _), ours) in enumerate(recipe.models.items()):
        digests = [None if theirs[number] is None else [from_plain(plain) for plain in theirs[number]] for theirs in by_rank]
        found = {rank: what for rank, digest in enumerate(digests) if (what := _difference(ours, digest, OWN))}
        alike = [digest for rank, digest in enumerate(digests) if rank not in found and digest is not None]
        first = ours if recipe.fallback is not None else next(iter(alike), None)
        found |= {rank: what for rank, digest in enumerate(digests) if rank not in found and (what := _difference(first, digest, SHARED))}
        if found:
            ranks = ("rank " if len(found) == 1 else "ranks ") + ", ".join(map(str, sorted(found)))
            raise SPError(
                f"{recipe.origin[node]} made another model in the worker of {ranks} than elsewhere: "
                f"{next(iter(found.values()))}. What it makes depends on the process: on the clock, a file, free memory or a random "
                "number. Remove this node, or SP Model Patch"
            )


def check_same_vae(recipe: Recipe, ours: vae_digest.Digest | None, by_rank: list[vae_digest.Digest]) -> None:
    """Compare the VAE of a recipe over the ranks, and with ComfyUI's process.

    Args:
        ours: the digest in ComfyUI's process; None where that computes on a device of another kind.

    Raises:
        SPError: the VAE is another one in a worker.
    """
    first = by_rank[0] if ours is None else ours
    found = {rank: what for rank, theirs in enumerate(by_rank) if (what := vae_digest.difference(first, theirs))}
    if found:
        ranks = ("rank " if len(found) == 1 else "ranks ") + ", ".join(map(str, sorted(found)))
        raise SPError(
            f"{recipe.origin[recipe.node]} made another VAE in the worker of {ranks} than elsewhere: {next(iter(found.values()))}. "
            "If another branch of the prompt changed the VAE that ComfyUI's process has loaded, free the models and the node cache. "
            "Else what a node makes depends on the process: on the clock, a file or a random number. Remove this node, or SP VAE Patch"
        )


def _difference(first: list[Any] | None, other: list[Any] | None, parts: Collection[str]) -> str | None:
    if first is None or other is None:
        return None
    if len(first) != len(other):
        return f"a list of {len(other)} models instead of {len(first)}"
    found = (difference(a, b, parts) for a, b in zip(first, other, strict=True))
    return next((what for what in found if what is not None), None)
