"""What every rank holds, told to every rank."""

from __future__ import annotations

import json
from typing import Any

from ...comm.small_collectives import all_gather_bytes
from ..model_digest import Part, as_plain, model_digest


def digests_of_all_ranks(outputs: list[list[Any] | None]) -> list[list[Any]]:
    """By rank, for each of ``outputs``: the digests of the MODELs in its list, None for an output that is not there. Collective."""
    weights: dict[int, Part] = {}
    mine = [None if members is None else [as_plain(model_digest(patcher, weights)) for patcher in members] for members in outputs]
    return [json.loads(told) for told in all_gather_bytes(None, json.dumps(mine).encode())]
