"""What ends a pool of real worker processes is noticed, named and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
from campaign import within
from distributed.pools import make_pool, wait_until
from leftovers import alive

from sp_core.errors import SPError
from sp_core.pool.errors import WorkerDied, WorkerFailed, WorkerTimeout

pytestmark = pytest.mark.usefixtures("echo_service")


def test_a_worker_that_dies_between_calls_is_noticed():
    pool = make_pool("cpu:2")
    pids, directory = pool.workers.pids(), pool.workers.directory
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until(lambda: pool.over and not directory.exists(), 10), "nobody noticed"
    assert not any(map(alive, pids.values())), "the other rank's memory stays taken"
    with pytest.raises(SPError, match="not running"):
        pool.call("sum", None)


def test_the_rank_that_keeps_the_others_waiting_is_named(monkeypatch):
    monkeypatch.setenv("SP_TIMEOUT_S", "4")
    pool = make_pool("cpu:3")
    with pytest.raises(WorkerTimeout, match="Rank 1 made no progress for 4 s while meeting") as failed:
        pool.call("enter_collective", 1, doing="meeting")
    log = Path(str(failed.value).rsplit(" ", 1)[1])
    assert "in handle" in log.read_text(), "the log does not say where the rank stood"


def test_a_lost_device_ends_the_pool():
    pool = make_pool("cpu:2")
    with pytest.raises(WorkerFailed, match="Rank 1 failed: its device does not answer any more"):
        pool.call("lose", 1)
    assert pool.over and not pool.workers.directory.exists()


def test_the_end_does_not_wait_for_a_call():
    """Ctrl-C ends the program while a step is being computed in another thread."""
    pool = make_pool("cpu:2")
    failed: list[Exception] = []

    def step() -> None:
        try:
            pool.call("stall", [0, 600])
        except SPError as error:
            failed.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.5)
    started = time.monotonic()
    pool.shutdown()
    assert time.monotonic() - started < within(10)
    thread.join(within(10))
    assert failed and not pool.workers.directory.exists()


def test_a_pool_that_ended_goes_with_its_last_user():
    """Its memory is mapped until it goes, and Python may look for circles of references much later."""
    gc.collect()
    gc.disable()
    try:
        pool = make_pool("cpu:2")
        left = weakref.ref(pool)
        pool.shutdown()
        del pool
        assert wait_until(lambda: left() is None, 5), "the pool holds itself"
    finally:
        gc.enable()


def test_a_failure_inside_a_collective_ends_the_pool_within_seconds():
    pool = make_pool("cpu:2")
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match="Rank 1 failed: told to fail on rank 1"):
        pool.call("fail", {"ranks": [1], "wait": True})
    assert time.monotonic() - started < within(10)
    assert not pool.usable
    assert not pool.workers.directory.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_named_and_nothing_is_left(rank):
    pool = make_pool("cpu:2")
    pids, directory = pool.workers.pids().values(), pool.workers.directory
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=f"rank {rank} ended unexpectedly \\(signal 9"):
        pool.call("die", rank)
    assert time.monotonic() - started < within(10)
    assert not any(map(alive, pids))
    assert not directory.exists()


def test_a_rank_that_stands_still_is_named(monkeypatch):
    monkeypatch.setenv("SP_TIMEOUT_S", "4")  # the other rank has this long to answer
    pool = make_pool("cpu:2")
    with pytest.raises(WorkerTimeout, match=r"Rank 1 made no progress for 4 s while stalling\..* raise SP_TIMEOUT_S"):
        pool.call("stall", [1, 60], doing="stalling")
    assert not pool.usable
