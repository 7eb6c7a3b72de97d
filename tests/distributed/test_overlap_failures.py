"""A rank that fails while heads are exchanged in groups: the others name it, nothing hangs, and nothing is left."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from distributed.failing_ranks import COUNTS, outcomes
from distributed.ranks import run_ranks
from torch import Tensor

from sp_core.attention.head_groups import Overlap
from sp_core.attention.ulysses import ulysses_attention
from sp_core.comm.lane import ThreadLane
from sp_core.comm.transport import Transport
from sp_core.comm.transports.shm import ShmTransport

HEADS, GROUPS = 12, 3


def attention(rank: int, transport: ShmTransport, second: Callable[[Tensor], Tensor]) -> None:
    """Values of all ranks' tokens, by groups of heads; ``second`` stands for the attention of the second group."""
    lane, calls = ThreadLane(), 0
    x = torch.full((1, COUNTS[rank], HEADS, 4), float(rank))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return second(v) if calls == 2 else v

    try:
        out = ulysses_attention(x, x, x, transport, COUNTS, attend, overlap=Overlap(lane, GROUPS))
        assert torch.equal(out, x)
    finally:
        assert lane.start(lambda: "serves")() == "serves"
        lane.close()


def killed(v: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return v


def late(v: Tensor) -> Tensor:
    time.sleep(30)
    return v


def of_another_type(v: Tensor) -> Tensor:
    return v.to(torch.float64)


def failing(v: Tensor) -> Tensor:
    raise ValueError("rank 1 cannot attend")


def one_is_killed(rank: int, transport: ShmTransport) -> None:
    attention(rank, transport, killed if rank == 1 else lambda v: v)


def one_is_late(rank: int, transport: ShmTransport) -> None:
    attention(rank, transport, late if rank == 1 else lambda v: v)


def one_has_another_type(rank: int, transport: ShmTransport) -> None:
    attention(rank, transport, of_another_type if rank == 1 else lambda v: v)


def one_fails_and_closes(rank: int, transport: ShmTransport) -> None:
    try:
        attention(rank, transport, failing if rank == 1 else lambda v: v)
    except ValueError:
        # as a worker does when it hears of the reset
        transport.close()
        raise


def user_cancels(rank: int, transport: ShmTransport) -> None:
    begun = time.monotonic()
    transport.should_abort = lambda: "the user cancelled" if time.monotonic() > begun + 1 else None
    attention(rank, transport, late if rank == 1 else lambda v: v)


@pytest.mark.parametrize(
    ("behave", "reporting", "words"),
    [
        (one_is_killed, {0, 2, 3}, r"rank 1 .*has ended"),
        (one_is_late, {0, 2, 3}, "rank 1 is late"),
        (one_has_another_type, {0, 1, 2, 3}, "rank 1"),
        (one_fails_and_closes, {0, 1, 2, 3}, "rank 1"),
        (user_cancels, {0, 2, 3}, "the user cancelled"),
    ],
)
def test_a_rank_that_fails_in_the_second_group_is_named(
    behave: Callable[[int, ShmTransport], None], reporting: set[int], words: str
) -> None:
    reports = outcomes(behave, ranks=len(reporting), timeout_s=5)
    assert set(reports) == reporting
    assert all(outcome in ("failed", "refused") for outcome, _, _ in reports.values()), reports
    for _, _, message in reports.values():
        assert re.search(words, message), reports


def all_fail_alike(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Every rank raises in the same group; the same transport then serves the next attention."""
    transport, lane = ShmTransport.create(), ThreadLane()
    counts = [3] * world_size
    x = torch.randn(1, 3, 4 * world_size, 4, generator=torch.Generator().manual_seed(rank))
    seen = []
    for failing_group in (1, 2, 3, 4):
        calls = 0

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == failing_group:  # noqa: B023
                raise ValueError("not this group")
            return v

        with pytest.raises(ValueError, match="not this group"):
            ulysses_attention(x, x, x, transport, counts, attend, overlap=Overlap(lane, 4))
        out = ulysses_attention(x, x, x, transport, counts, lambda q, k, v: v, overlap=Overlap(lane, 4))
        assert torch.equal(out, x)
        seen.append((failing_group, transport.stats.exchanges))
    lane.close()
    transport.close()
    return seen


def test_ranks_that_fail_alike_stay_in_step() -> None:
    first, *others = run_ranks(3, all_fail_alike)
    assert len(first) == 4
    assert all(other == first for other in others)


def live_bytes() -> int:
    gc.collect()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects() if torch.is_tensor(x)}
    return sum(storages.values())


def growing(rank: int, world_size: int) -> tuple[int, int, int]:
    """(bytes of tensors that were left, threads that were left, most bytes of receive memory beside what one group needs)."""
    threads = threading.active_count()
    transport: Transport = ShmTransport.create()
    lane = ThreadLane()
    before = live_bytes()
    largest = 0
    for number in range(200):
        tokens = 16 + 8 * number
        x = torch.zeros(1, tokens, 8, 32)
        ulysses_attention(x, x, x, transport, [tokens] * world_size, lambda q, k, v: v, overlap=Overlap(lane, 4))
        largest = max(largest, 3 * x.nbytes // 4)
        del x
    lane.start(lambda: None)()  # behind it the lane's thread has let go of the last exchange
    left = live_bytes() - before
    assert isinstance(transport, ShmTransport)
    held = os.fstat(transport._file).st_blocks * 512
    lane.close()
    transport.close()
    return left, threading.active_count() - threads, held // largest


def test_two_hundred_growths_leave_nothing() -> None:
    for left, threads, times in run_ranks(2, growing):
        assert left <= 0
        assert threads <= 1, "the lane's thread may be about to end"
        # each of the four groups has a quarter of the heads: slots of a quarter, of which several are in turn
        assert times < 14
