"""A cancel of a call to real worker processes, and what waits for its end."""

from __future__ import annotations

import pytest
from distributed.pools import in_a_block, make_pool, wait_until

from sp_core.errors import SPError
from sp_core.pool.coordinator import Pool
from sp_core.pool.errors import Cancelled, WorkerDied, WorkerFailed

pytestmark = pytest.mark.usefixtures("echo_service")


def test_a_cancel_stops_all_ranks_at_the_same_block(pool):
    for polls in (1, 2, 5):
        calls = iter(range(1000))
        with pytest.raises(Cancelled):
            # the service meets its peers in every block: ranks that stopped at different blocks would hang
            pool.call("blocks", {"blocks": 10_000, "seconds": 0.002}, watch=lambda _, calls=calls, polls=polls: next(calls) >= polls)
        assert pool.call("sum", None).item() == 6


def test_a_cancel_does_not_wait_for_a_long_block(pool, gate):
    """The caller goes on; the ranks stop at their next block, and the next call waits for that."""
    with pytest.raises(Cancelled):
        pool.call("blocks", {"blocks": 100, "until": str(gate)}, watch=in_a_block)
    looks = iter(range(1000))

    def open_later(_: Pool) -> bool:
        if next(looks) == 5:
            gate.touch()
        return False

    assert pool.call("sum", None, watch=open_later).item() == 6
    assert next(looks) > 5, "the next call did not wait"


def test_what_comes_afterwards_waits_for_what_was_cancelled_and_nobody_for_it(pool, gate):
    pool.afterwards("note", lambda: "at once", "noting")
    assert pool.call("note", "first") == ["at once", "first"]
    with pytest.raises(Cancelled):
        pool.call("blocks", {"blocks": 100, "until": str(gate)}, watch=in_a_block)
    said: list[str] = []
    for word in ("second", "third"):
        pool.afterwards("note", lambda word=word: said.append(word) or word, "noting")
    assert said == []
    gate.touch()
    # nobody has to call for it
    assert wait_until(lambda: said == ["second", "third"], 20)
    assert pool.call("note", "fourth") == ["at once", "first", "second", "third", "fourth"]
    # a failure is a line in the log
    pool.afterwards("fail", lambda: {"ranks": [0, 1, 2]}, "failing")
    assert pool.call("sum", None).item() == 6


@pytest.mark.parametrize(("operation", "end"), [("die", WorkerDied), ("lose", WorkerFailed)])
def test_a_pool_that_ended_behind_a_cancel_is_not_used(operation, end, gate):
    """What the ranks did last may show in the next request only: an error of a device, or a worker that is gone."""
    pool = make_pool("cpu:2")
    with pytest.raises(Cancelled):
        pool.call("blocks", {"blocks": 100, "until": str(gate)}, watch=in_a_block)
    with pool._lock:  # before it settles by itself
        pool.afterwards(operation, 1, "ending")
        gate.touch()
        with pytest.raises(end):
            pool.settle()
    assert pool.over
    with pytest.raises(SPError, match="not running"):
        pool.call("sum", None)


def test_a_pool_that_ended_when_every_rank_had_stopped_is_not_used():
    """A cancel before the first block: the ranks stop at once or during the wait for them, as the machine's speed has it."""
    pool = make_pool("cpu:2")
    with pytest.raises(Cancelled):
        pool.call("blocks", {"blocks": 100, "seconds": 0.1}, watch=lambda _: True)
    pool.settle()
    pool.afterwards("die", 1, "ending")
    assert pool.over
    with pytest.raises(SPError, match="not running"):
        pool.settle()


def test_a_wait_for_what_was_cancelled_can_be_cancelled(pool, gate):
    with pytest.raises(Cancelled):
        pool.call("blocks", {"blocks": 100, "until": str(gate)}, watch=in_a_block)
    with pytest.raises(Cancelled):
        pool.call("sum", None, watch=lambda _: True)
    gate.touch()
    assert pool.call("sum", None).item() == 6
