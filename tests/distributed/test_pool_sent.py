"""Requests whose answers nobody waits for: the next call comes behind them."""

from __future__ import annotations

import threading

import pytest
from distributed.pools import make_pool

from sp_core.errors import SPError
from sp_core.pool.errors import Cancelled, WorkerDied, WorkerFailed

pytestmark = pytest.mark.usefixtures("echo_service")


def test_nobody_waits_for_what_is_only_sent_and_the_next_call_comes_behind_it(pool, gate):
    before = pool.call("note", "before")
    pool.afterwards("blocks", {"blocks": 1, "until": str(gate)}, "opening", wait=False)
    assert not pool.is_busy()
    # a second one comes behind the first, as each is written over the one before
    threading.Timer(0.2, gate.touch).start()
    pool.afterwards("note", "sent", "noting", wait=False)
    assert gate.exists()
    pool.afterwards("fail", {"ranks": [1]}, "failing", wait=False)
    assert pool.call("note", "after") == [*before, "sent", "after"]


def test_a_call_behind_what_is_only_sent_can_be_cancelled(pool, gate):
    pool.afterwards("blocks", {"blocks": 100, "until": str(gate)}, "opening", wait=False)
    with pytest.raises(Cancelled):
        pool.call("sum", None, watch=lambda _: True)
    gate.touch()
    assert pool.call("sum", None).item() == 6


@pytest.mark.parametrize(("operation", "end"), [("die", WorkerDied), ("lose", WorkerFailed)])
def test_workers_that_end_behind_what_is_only_sent_fail_the_next_call(operation, end):
    pool = make_pool("cpu:2")
    pool.afterwards(operation, 1, "ending", wait=False)
    with pytest.raises((end, SPError)):
        pool.call("sum", None)
    assert pool.over
