"""Before a forward whose blocks may be compiled, ranks tell each other why some are not: one that is compiled on any is so on all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...comm import Transport
from ...parallel.groups import ParallelGroups

#: what one rank can tell
MESSAGE_BYTES = 4096
#: of one reason
REASON_CHARACTERS = 200


class Reason(NamedTuple):
    """Why something is not compiled."""

    why: str
    #: the first rank that says so
    rank: int
    #: every rank that was asked says so
    everywhere: bool = True

    def __str__(self) -> str:
        return self.why if self.everywhere else f"{self.why} (on rank {self.rank})"


def agree(reasons: Mapping[str, str], rank: int, groups: ParallelGroups, device: torch.device) -> dict[str, str]:
    """What ranks of a forward have, equal on all of them. Collective over the ranks of ``groups``, and ends where another rank failed.

    Args:
        reasons: of this rank: what is not compiled -> why.
        rank: this rank's number in the pool.
        device: where a transport can take tensors from.
    """
    told = {what: Reason(why[:REASON_CHARACTERS], rank) for what, why in reasons.items()}
    for transport in (groups.sequence.all_ranks, groups.cfg):
        if transport is not None:
            told = united([_read(message) for message in _gathered(_written(told), transport, device)])
    return {what: str(reason) for what, reason in told.items()}


def united(by_rank: Sequence[Mapping[str, Reason]]) -> dict[str, Reason]:
    """All that any rank has, or any group of ranks; of several reasons for one thing the first."""
    found: dict[str, Reason] = {}
    for what, reason in (item for told in by_rank for item in told.items()):
        theirs = [told.get(what) for told in by_rank]
        everywhere = all(other is not None and other.everywhere and other.why == reason.why for other in theirs)
        found.setdefault(what, reason._replace(everywhere=everywhere))
    return found


def _written(told: Mapping[str, Reason]) -> bytes:
    """As many as there is room for."""
    items = [[what, *reason] for what, reason in told.items()]
    while len(message := json.dumps(items, ensure_ascii=False).encode()) > MESSAGE_BYTES:
        items.pop()
    return message.ljust(MESSAGE_BYTES)


def _read(message: bytes) -> dict[str, Reason]:
    return {what: Reason(*reason) for what, *reason in json.loads(message)}


def _gathered(message: bytes, transport: Transport, device: torch.device) -> list[bytes]:
    mine_11N = torch.frombuffer(bytearray(message), dtype=torch.int32)[None, None].to(device)
    all_1RN = transport.all_gather_tokens(mine_11N, [1] * transport.world_size)
    return [row.cpu().numpy().tobytes() for row in all_1RN[0]]
