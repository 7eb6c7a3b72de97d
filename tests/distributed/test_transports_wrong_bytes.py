"""A transport that delivers one wrong byte is noticed before anything is computed from it, and another one goes on.

The fault is put into a real transport. Each case is run a second time with the check turned off: then the byte comes through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from distributed.exchange_cases import SHM_AND_GLOO, same_bytes
from distributed.ranks import RankPools
from torch import Tensor

from sp_core.comm import Transport
from sp_core.comm.choice import make_transport
from sp_core.comm.registry import TransportSpec, slowed
from sp_core.comm.transport import Slots
from sp_core.layout import shard_range, shard_sizes

KB = 1 << 10
#: bytes of the slots before they grow
FIRST_SLOT = 64 * KB


@dataclass(frozen=True)
class Fault:
    """One bit that is wrong: at ``place`` of a slot (from its end where negative), on these ranks and in these slots."""

    place: int
    rank: int | None = None
    slot: int | None = None
    #: only once the slots were made anew
    grown: bool = False
    row: str = "shm"
    #: the others are there too and slower, so that exchanges are timed, which makes the slots grow
    timed: bool = False


FAULTS = {
    "at the start of a slot": Fault(0),
    "in the middle of a slot": Fault(30_011),
    "in one slot of three": Fault(17_123, slot=2),
    "in its last byte": Fault(-1),
    "in its last 1 KB": Fault(-700),
    "on one rank": Fault(12_345, rank=1),
    "in its last byte, in one slot, on one rank": Fault(-1, rank=0, slot=1),
    "after growth": Fault(150_001, grown=True),
    "after growth, in its last byte, in one slot, on one rank": Fault(-1, rank=1, slot=0, grown=True),
    "after growth, while it was timed": Fault(300_001, rank=1, grown=True, timed=True),
    "in the plain collective": Fault(41_001, row="gloo"),
    "in the plain collective, on one rank": Fault(7, rank=1, row="gloo"),
    "in the plain collective, in large exchanges": Fault(150_001, rank=0, row="gloo", grown=True),
}


class Flips(Transport):
    """Exchanges by ``inner`` into slots of a fixed size, in turn, one of which has a bad place."""

    device_type = "cpu"
    name = "flips"

    def __init__(self, inner: Transport, fault: Fault) -> None:
        super().__init__(inner.rank, inner.world_size)
        self.inner, self.fault = inner, fault
        self._slot_bytes, self._made, self._number = FIRST_SLOT, 0, 0

    def reserve(self, size: int) -> Slots:
        if size > self._slot_bytes:
            self._slot_bytes, self._made = -(-size // FIRST_SLOT) * FIRST_SLOT, self._made + 1
        return Slots(3, self._slot_bytes, self._made)

    def _spoiled(self, outputs: list[Tensor]) -> list[Tensor]:
        self.reserve(max(sum(x.nbytes for x in outputs), self._slot_bytes))
        slot, self._number = self._number % 3, self._number + 1
        place = self.fault.place % self._slot_bytes
        here = self.fault.rank in (None, self.rank) and self.fault.slot in (None, slot) and (self._made > 0 or not self.fault.grown)
        for output in outputs if here else []:
            if place < output.nbytes:
                output.view(-1).view(torch.uint8)[place] ^= 4
                break
            place -= output.nbytes
        return outputs

    def _scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int], head_counts: Sequence[int]) -> list[Tensor]:
        return self._spoiled(self.inner._scatter_heads(tensors_BtHD, token_counts, head_counts))

    def _gather_heads(self, tensor_BThD: Tensor, token_counts: Sequence[int], head_counts: Sequence[int]) -> Tensor:
        return self._spoiled([self.inner._gather_heads(tensor_BThD, token_counts, head_counts)])[0]

    def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        return self._spoiled([self.inner._all_gather_tokens(tensor_Bt, token_counts)])[0]

    def close(self) -> None:
        self.inner.close()


def _faulty(make: Callable[[TransportSpec], Transport], fault: Fault, spec: TransportSpec) -> Transport:
    return Flips(make(spec), fault)


def forward(rank: int, world_size: int, directory: str, fault: Fault, trial_bytes: int) -> tuple[bool, str, str]:
    """(whether every exchange of growing forwards was right, what was exchanged by in the end, the reason at the start)."""
    logging.disable(logging.CRITICAL)

    # the transport with the fault is taken wherever it works
    rows = [replace(row, spare=row.name != fault.row) for row in sorted(SHM_AND_GLOO, key=lambda row: row.name != fault.row)]
    if fault.timed:
        rows = [rows[0], *(replace(slowed(row, 1e9, 0.02), name=row.name, spare=False) for row in rows[1:])]
    rows[0] = replace(rows[0], make=partial(_faulty, rows[0].make, fault))
    transport, reason = make_transport(None, "cpu", directory=directory, rows=rows, trial_bytes=trial_bytes)
    right = True
    # with 256 and 1024 tokens q, k and v fill a slot to its last byte
    for tokens, H in ((64, 4), (256, 4), (257, 4), (1024, 4)):
        counts = shard_sizes(tokens, world_size)
        low, high = shard_range(H, world_size, rank)
        first = sum(counts[:rank])
        for number in range(6):
            whole = torch.randint(0, 256, (3, 1, tokens, H, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
            mine = whole[:, :, first : first + counts[rank]]
            scattered = transport.scatter_heads(list(mine), counts)
            back = transport.gather_heads(scattered[0], H, counts)
            # four exchanges a round, so that the largest comes to every slot
            gathered, _ = [transport.all_gather_tokens(mine[0], counts) for _ in range(2)]
            right &= all(same_bytes(x, y[:, :, low:high]) for x, y in zip(scattered, whole, strict=True))
            right &= same_bytes(back, mine[0]) and same_bytes(gathered, whole[0])
    name = transport.name
    transport.close()
    return right, name, reason


@pytest.mark.parametrize("where", FAULTS)
def test_a_wrong_byte_is_noticed_and_another_transport_goes_on(ranks: RankPools, where: str, tmp_path: Path) -> None:
    fault = FAULTS[where]
    other = "gloo" if fault.row == "shm" else "shm"
    outcomes = ranks.call(2, forward, str(tmp_path), fault, FIRST_SLOT)
    for right, name, reason in outcomes:
        assert (right, name.removeprefix("slow-")) == (True, other)
        if not fault.grown:
            culprit = 0 if fault.rank is None else fault.rank
            assert reason == f"{other}, verified (not {fault.row}: wrong data on rank {culprit})"


@pytest.mark.parametrize("where", FAULTS)
def test_without_the_check_the_wrong_byte_comes_through(ranks: RankPools, where: str, tmp_path: Path) -> None:
    rights = [right for right, _, _ in ranks.call(2, forward, str(tmp_path), FAULTS[where], 0)]
    assert not all(rights)


def only_faulty(rank: int, world_size: int, directory: str) -> str:
    logging.disable(logging.CRITICAL)
    rows = [replace(row, make=partial(_faulty, row.make, Fault(99, rank=1))) for row in SHM_AND_GLOO]
    with pytest.raises(RuntimeError) as caught:
        make_transport(None, "cpu", directory=directory, rows=rows)
    return str(caught.value)


def test_where_every_transport_is_wrong_none_is_used(ranks: RankPools, tmp_path: Path) -> None:
    sentence = "no transport works between these 2 ranks: gloo: wrong data on rank 1; shm: wrong data on rank 1"
    assert ranks.call(2, only_faulty, str(tmp_path)) == [sentence] * 2
