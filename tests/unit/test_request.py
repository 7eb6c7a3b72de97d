"""A request whose coordinator is held up: what it says of a rank that ended meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sp_core.pool.control import Frame
from sp_core.pool.errors import WorkerDied
from sp_core.pool.protocol import ReplyStatus
from sp_core.pool.request import FAILURE_GRACE_S, Request
from sp_core.pool.shared_buffer import SharedBuffer
from sp_core.pool.shared_state import SharedState


@pytest.mark.parametrize("dead", [True, False])
def test_a_rank_that_ended_is_told_as_such_however_long_this_process_was_held_up(
    dead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 ends and rank 0 fails in its exchange with it. Between the two the coordinator does not run for long."""
    buffer = SharedBuffer.create(tmp_path, "shared_state", SharedState.nbytes(2))
    workers: Any = None
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    request = Request(7, "testing", workers, SharedState(buffer, 2))
    looks = 0

    def incoming() -> Iterator[tuple[int, Frame]]:
        nonlocal looks, now
        looks += 1
        if looks == 1:
            yield 0, Frame(ReplyStatus.FAILED, 7)
            now += 2 * FAILURE_GRACE_S
        elif dead:
            raise WorkerDied(1, "signal 9", "log")

    if dead:
        with pytest.raises(WorkerDied, match="rank 1"):
            request.collect(incoming, None)
    else:
        request.collect(incoming, None)
        assert request.late == [1] and request.failed == [0]
    assert looks == 2
    buffer.close()
