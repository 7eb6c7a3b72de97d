"""Worker processes start and join in time, or a sentence says why not."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import pytest
from distributed.pools import ECHO, HERE

from sp_core.errors import SPError
from sp_core.pool import launcher
from sp_core.pool.coordinator import Pool
from sp_core.pool.devices import parse_devices
from sp_core.pool.errors import WorkerTimeout
from sp_core.pool.launcher import ServiceSpec

pytestmark = pytest.mark.usefixtures("echo_service")


def test_a_start_that_was_left_can_be_joined():
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ECHO)
    pool.launch()

    def leave(_: Pool) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.join(leave)
    pids = pool.workers.pids()
    pool.join()
    assert pool.call("sum", None).item() == 3
    assert pool.workers.pids() == pids
    pool.shutdown()


def test_no_room_on_disk_is_a_sentence(monkeypatch):
    monkeypatch.setattr(launcher, "ROOM_BYTES", 1 << 60)
    with pytest.raises(SPError, match=r"The workers cannot be started: .*KB are free.*Free some disk space"):
        Pool(parse_devices("cpu:2", "cpu", 0), ECHO)


def test_a_worker_that_the_system_does_not_start_is_a_sentence(monkeypatch):
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ECHO)
    monkeypatch.setattr(sys, "executable", str(HERE / "no python"))
    with pytest.raises(SPError, match=r"The worker of rank 0 cannot be started \(No such file or directory\)"):
        pool.launch()
    assert pool.over and not pool.workers.directory.exists()


def test_a_start_that_takes_too_long_names_its_own_limit(monkeypatch, tmp_path):
    (tmp_path / "slow_start.py").write_text("import time\n\n\ndef wait(options):\n    time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{HERE}")
    monkeypatch.setenv("SP_START_TIMEOUT_S", "2")
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ServiceSpec("echo_service:EchoService", before_torch="slow_start:wait"))
    with pytest.raises(WorkerTimeout, match=r"Rank 0, 1 made no progress for 2 s while starting\..* raise SP_START_TIMEOUT_S\."):
        pool.start()
    assert pool.over and not pool.workers.directory.exists()


@pytest.mark.campaign
def test_a_service_that_takes_too_long_to_make_names_the_start_limit(monkeypatch):
    """Importing ComfyUI is one long step: the limit of the start holds until it is done."""
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ServiceSpec("echo_service:EchoService", {"start_seconds": [60, 0]}))
    pool.start()
    monkeypatch.setenv("SP_TIMEOUT_S", "1")
    monkeypatch.setenv("SP_START_TIMEOUT_S", "8")  # in which the other rank starts
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"Rank 0 made no progress for 8 s while sum\..* raise SP_START_TIMEOUT_S\."):
        pool.call("sum", None)
    assert time.monotonic() - started > 8


@pytest.mark.parametrize("killed", [False, True])
def test_no_thread_listens_to_a_pool_that_has_ended(killed):
    """One that comes back from torch while Python ends would abort the program."""
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ECHO)
    pool.start()
    mine = [thread for thread in threading.enumerate() if thread.name.startswith(("sp-join", "sp-listen"))]
    assert mine
    pool._links._lost = lambda rank: time.sleep(0.3)  # as on a machine that is busy
    pool.shutdown(grace_s=0 if killed else 2)
    assert not any(thread.is_alive() for thread in mine)


def test_workers_wait_for_each_other_as_long_as_the_start_may_take(monkeypatch):
    monkeypatch.setenv("SP_START_TIMEOUT_S", "77")
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ECHO)
    monkeypatch.delenv("SP_START_TIMEOUT_S")
    pool.start()
    assert json.loads((pool.workers.directory / "config.json").read_text())["start_timeout_s"] == 77
    pool.shutdown()
