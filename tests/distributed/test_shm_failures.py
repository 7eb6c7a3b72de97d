"""What goes wrong with a rank becomes an error that names it, on every other rank, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed.failing_ranks import COUNTS, exchange, outcomes
from distributed.ranks import run_ranks

from sp_core.comm.errors import ExchangeError
from sp_core.comm.transports.shm import ShmTransport
from sp_core.layout import shard_sizes


def kill_rank_1(rank: int, transport: ShmTransport) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange(rank, transport)


def test_killed_rank_is_named_at_once() -> None:
    reports = outcomes(kill_rank_1, ranks=3)
    assert set(reports) == {0, 2, 3}
    for outcome, _, message in reports.values():
        assert outcome == "failed"
        assert "rank 1" in message
        assert "has ended" in message


def late_by_30_s(rank: int, transport: ShmTransport) -> None:
    if rank == 2:
        time.sleep(30)  # far longer than the others wait
    exchange(rank, transport)


def test_rank_late_by_30_s_is_named_within_the_timeout() -> None:
    reports = outcomes(late_by_30_s, ranks=3, timeout_s=5)
    for outcome, _, message in reports.values():
        assert outcome == "failed"
        assert "rank 2 is late" in message
    assert set(reports) == {0, 1, 3}


def late_by_7_s(rank: int, transport: ShmTransport) -> None:
    if rank == 2:
        time.sleep(7)
    # complete for the late rank: the others had sent everything before they gave up
    delivered = exchange(rank, transport)
    assert torch.equal(delivered[0, :, 0, 0], torch.arange(4.0).repeat_interleave(torch.tensor(COUNTS))), "stale data"
    exchange(rank, transport)


def test_late_rank_learns_that_the_others_gave_up() -> None:
    reports = outcomes(late_by_7_s, ranks=4, timeout_s=3)
    outcome, culprit, message = reports[2]
    assert outcome == "failed"
    assert culprit in (0, 1, 3)
    assert "gave up" in message


def larger_batch(rank: int, transport: ShmTransport) -> None:
    exchange(rank, transport, B=7 if rank == 2 else 1)


def larger_head_dim_elsewhere(rank: int, transport: ShmTransport) -> None:
    exchange(rank, transport, D=5 if rank == 2 else 4000)


def other_dtype(rank: int, transport: ShmTransport) -> None:
    # the same number of bytes: only the type tells
    dtype = torch.int16 if rank == 2 else torch.bfloat16
    transport.scatter_heads([torch.zeros(1, COUNTS[rank], 8, 4, dtype=dtype)], COUNTS)


def other_call(rank: int, transport: ShmTransport) -> None:
    if rank == 2:
        transport.all_gather_tokens(torch.zeros(1, COUNTS[rank], 8, 5), COUNTS)
    else:
        exchange(rank, transport)


def other_token_counts(rank: int, transport: ShmTransport) -> None:
    counts = (2, 3, 2, 2) if rank == 2 else COUNTS
    transport.scatter_heads([torch.zeros(1, COUNTS[rank], 8, 5)], counts)


@pytest.mark.parametrize("behave", [larger_batch, larger_head_dim_elsewhere, other_dtype, other_call, other_token_counts])
def test_rank_with_another_shape_is_named(behave: Callable[[int, ShmTransport], None]) -> None:
    reports = outcomes(behave, ranks=4)
    for rank, (outcome, _, message) in reports.items():
        assert outcome == "failed", reports
        assert "rank 2" in message
        assert ("came to exchange" in message) or (rank != 2 and "gave up" in message)


def wrong_tensor(rank: int, transport: ShmTransport) -> None:
    tokens = 9 if rank == 2 else COUNTS[rank]
    transport.scatter_heads([torch.zeros(1, tokens, 8, 5)], COUNTS)


def test_tensor_that_contradicts_the_counts_is_refused_and_releases_the_others() -> None:
    reports = outcomes(wrong_tensor, ranks=4)
    assert reports[2][0] == "refused"
    for rank in (0, 1, 3):
        outcome, _, message = reports[rank]
        assert outcome == "failed"
        assert "rank 2: got 9 tokens" in message


def aborted(rank: int, transport: ShmTransport) -> None:
    if rank == 3:
        time.sleep(30)
    begun = time.monotonic()
    transport.should_abort = lambda: "the user cancelled" if rank == 0 and time.monotonic() > begun + 0.3 else None
    exchange(rank, transport)


def test_abort_ends_the_wait_everywhere() -> None:
    reports = outcomes(aborted, ranks=3)
    assert set(reports) == {0, 1, 2}
    assert reports[0][2] == "the user cancelled"
    for outcome, _, message in reports.values():
        assert outcome == "failed"
        assert "the user cancelled" in message


def once_more(rank: int, transport: ShmTransport) -> None:
    try:
        larger_batch(rank, transport)
    except ExchangeError:
        exchange(rank, transport)


def test_nothing_is_delivered_after_a_failure() -> None:
    for outcome, _, message in outcomes(once_more, ranks=4).values():
        assert outcome == "failed"
        assert "cannot exchange any more" in message


def close_early(rank: int, transport: ShmTransport) -> None:
    exchange(rank, transport)
    if rank == 1:
        transport.close()
    else:
        exchange(rank, transport)


def test_rank_that_closed_is_named() -> None:
    reports = outcomes(close_early, ranks=4)
    assert reports.pop(1)[0] == "delivered"
    for outcome, _, message in reports.values():
        assert outcome == "failed"
        assert "rank 1 has closed" in message


def growing(rank: int, world_size: int) -> tuple[int, int, int, int, int]:
    """Open descriptors before, with the transport, and after; mappings left; bytes of the shared file at the end."""
    descriptors = len(os.listdir("/proc/self/fd"))
    transport = ShmTransport.create()
    highest = 0
    for number in range(200):
        counts = shard_sizes(16 + 24 * number, world_size)
        q, k = transport.scatter_heads([torch.randn(1, counts[rank], 8, 64) for _ in range(2)], counts)
        transport.gather_heads(q, 8, counts)
        del q, k
        highest = max(highest, len(os.listdir("/proc/self/fd")))
    blocks = os.fstat(transport._file).st_blocks * 512
    transport.close()
    maps = Path("/proc/self/maps").read_text().count("sp_exchange")
    return descriptors, highest, len(os.listdir("/proc/self/fd")), maps, blocks


def test_growing_sizes_leak_nothing() -> None:
    largest = 2 * (16 + 24 * 199) * 4 * 64 * 4
    for before, highest, after, maps, blocks in run_ranks(2, growing):
        assert after <= before
        assert highest - before < 40
        assert maps == 0
        # what the file no longer needs went back to the system: without that it would be seven times
        assert blocks < 6 * largest


def names() -> set[str]:
    """Everything that an exchange could have left under a name."""
    entries = [entry for folder in ("/dev/shm", tempfile.gettempdir()) for entry in os.listdir(folder)]
    return {entry for entry in entries if "exchange" in entry or "memfd" in entry}


def exchange_for_ever(rank: int, transport: ShmTransport) -> None:
    kept = exchange(rank, transport, D=100_000)
    assert kept.numel()

    def again() -> None:
        while True:
            exchange(rank, transport, D=100_000)

    threading.Thread(target=again, daemon=True).start()


def test_nothing_is_left_after_kill_9() -> None:
    """All ranks die in the middle of an exchange."""
    before = names()
    reports = outcomes(exchange_for_ever, ranks=4)
    assert {outcome for outcome, _, _ in reports.values()} == {"delivered"}
    assert names() <= before
