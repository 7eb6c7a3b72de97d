"""What every rank holds, told to every rank."""

from __future__ import annotations

import json
from typing import Any

from ...comm.small_collectives import all_gather_bytes
from ..model_digest import Weights, as_plain, model_digest
from ..vae_digest import Digest, vae_digest


def digests_of_all_ranks(outputs: list[list[Any] | None]) -> list[list[Any]]:
    """By rank, for each of ``outputs``: the digests of the MODELs in its list, None for an output that is not there. Collective."""
    weights: Weights = {}
    mine = [None if members is None else [as_plain(model_digest(patcher, weights)) for patcher in members] for members in outputs]
    return _told_by_all_ranks(mine)


def vae_of_all_ranks(vae: Any) -> list[Digest]:
    """By rank, the digest of its ``vae``. Collective."""
    return _told_by_all_ranks(vae_digest(vae))


def _told_by_all_ranks(mine: Any) -> list[Any]:
    return [json.loads(told) for told in all_gather_bytes(None, json.dumps(mine).encode())]
