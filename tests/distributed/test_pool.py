"""The pool with real worker processes: calls, failures, cancel, ends."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from campaign import within

from sp_core.errors import SPError
from sp_core.pool import console, launcher
from sp_core.pool.coordinator import Pool
from sp_core.pool.devices import parse_devices
from sp_core.pool.errors import Cancelled, WireError, WorkerDied, WorkerFailed, WorkerTimeout
from sp_core.pool.launcher import ServiceSpec

HERE = Path(__file__).parent


def make_pool(devices: str = "cpu:3") -> Pool:
    pool = Pool(parse_devices(devices, "cpu", 0), ServiceSpec("echo_service:EchoService"))
    pool.start()
    return pool


@pytest.fixture(scope="module", autouse=True)
def service_path():
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(HERE)
    yield
    os.environ.pop("PYTHONPATH") if before is None else os.environ.__setitem__("PYTHONPATH", before)


@pytest.fixture(scope="module")
def shared_pool():
    pool = make_pool()
    yield pool
    pool.shutdown()


@pytest.fixture
def pool(shared_pool):
    assert shared_pool.usable, "an earlier test broke the shared pool"
    return shared_pool


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + within(seconds)
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def in_a_block(pool: Pool) -> bool:
    """The ranks of the newest request have entered a block: a cancel now cannot stop them before the next one."""
    return pool.shared_state.header.leader_entered >> 20 == pool._request


def test_a_call_gives_back_what_it_was_given(pool):
    body = {"x": torch.randn(3, 5), "options": {"a": (1, 2.5, None, "text"), 3: [True, torch.Size((2, 3))]}, "t": torch.arange(4)}
    answer = pool.call("echo", body)
    assert torch.equal(answer["x"], body["x"])
    assert torch.equal(answer["t"], body["t"])
    assert answer["options"] == body["options"]


def test_all_ranks_take_part(pool):
    assert pool.call("sum", None).item() == 1 + 2 + 3


def test_every_rank_can_answer_with_a_value_of_its_own(pool):
    rows: dict[int, torch.Tensor] = {}
    assert pool.call("own rows", {"rows": 5}, each=lambda rank, value: rows.__setitem__(rank, value.clone())) is None
    assert {rank: value.tolist() for rank, value in rows.items()} == {rank: [[rank] * 4] * 5 for rank in range(3)}
    assert pool.call("echo", 1) == 1


def test_conditioning_is_sent_once_and_changes_are_seen(pool):
    context = torch.randn(1, 512, 64)
    pool.call("echo", {"context": context})
    first = pool.last_call
    pool.call("echo", {"context": context.clone()})
    again = pool.last_call
    assert again.bytes_sent < 1024 < first.bytes_sent
    assert again.bytes_reused == context.numel() * 4
    context[0, 0, 0] += 1  # in place: the same object, another value
    assert torch.equal(pool.call("echo", {"context": context})["context"], context)
    pool.forget_sent()
    assert torch.equal(pool.call("echo", {"context": context})["context"], context)


def test_calls_inside_and_outside_inference_mode_mix(pool):
    """Sampling runs in inference mode, the unload button does not; both write to the same buffers."""
    with torch.inference_mode():
        big = torch.randn(1 << 20)
        assert torch.equal(pool.call("echo", {"x": big})["x"], big)
    assert pool.call("sum", None).item() == 6
    small = torch.randn(2048)
    assert torch.equal(pool.call("echo", {"x": small})["x"], small)


def test_volatile_places_are_not_remembered(pool):
    x = torch.randn(1, 512, 64)
    for _ in range(2):
        pool.call("echo", {"x": x}, volatile=("x",))
        assert pool.last_call.bytes_reused == 0


def test_what_cannot_be_sent_is_named_and_harms_nothing(pool):
    with pytest.raises(WireError, match=r"1\.patch\.0.*lambda"):
        pool.call("echo", {"patch": [lambda x: x]})
    assert pool.call("sum", None).item() == 6


def test_a_failure_on_every_rank_leaves_the_pool_alive(pool):
    # whoever fails first is named
    with pytest.raises(WorkerFailed, match=r"Rank (\d) failed: told to fail on rank \1"):
        pool.call("fail", {"ranks": [0, 1, 2]})
    assert pool.call("sum", None).item() == 6


def test_the_trace_of_a_failure_is_on_the_console_before_its_sentence(pool, monkeypatch):
    """A person reads the console in order, and the prompt ends with the sentence."""
    written: list[str] = []
    monkeypatch.setattr(pool.workers._console, "_write", written.append)
    monkeypatch.setattr(console, "LOG_POLL_S", 5.0)
    time.sleep(0.2)  # the reader's present pause ends
    for _ in range(3):
        written.clear()
        with pytest.raises(WorkerFailed, match="Rank 1 failed: told to fail on rank 1"):
            pool.call("fail", {"ranks": [1]})
        assert "".join(written).count("[SP rank 1] Traceback") == 1
        assert "[SP rank 1] ValueError: told to fail on rank 1" in "".join(written)


def test_a_failure_on_one_rank_outside_a_collective_leaves_the_pool_alive(pool):
    with pytest.raises(WorkerFailed, match="Rank 2 failed"):
        pool.call("fail", {"ranks": [2]})
    assert pool.call("sum", None).item() == 6


def test_a_cancel_stops_all_ranks_at_the_same_block(pool):
    for polls in (1, 2, 5):
        calls = iter(range(1000))
        with pytest.raises(Cancelled):
            # the service meets its peers in every block: ranks that stopped at different blocks would hang
            pool.call("blocks", {"blocks": 10_000, "seconds": 0.002}, watch=lambda _, calls=calls, polls=polls: next(calls) >= polls)
        assert pool.call("sum", None).item() == 6


@pytest.fixture
def gate(tmp_path):
    """A block that waits for this file lasts until the test ends it, however fast the machine is."""
    path = tmp_path / "open"
    yield path
    path.touch()


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


def test_an_answer_that_cannot_be_sent_is_a_failure_of_its_request(pool):
    with pytest.raises(WorkerFailed, match="Rank 0 failed: cannot send 'function'"):
        pool.call("unsendable", None)
    assert pool.call("sum", None).item() == 6


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


def test_a_start_that_was_left_can_be_joined():
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ServiceSpec("echo_service:EchoService"))
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
        Pool(parse_devices("cpu:2", "cpu", 0), ServiceSpec("echo_service:EchoService"))


def test_a_worker_that_the_system_does_not_start_is_a_sentence(monkeypatch):
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ServiceSpec("echo_service:EchoService"))
    monkeypatch.setattr(sys, "executable", str(HERE / "no python"))
    with pytest.raises(SPError, match=r"The worker of rank 0 cannot be started \(No such file or directory\)"):
        pool.launch()
    assert pool.over and not pool.workers.directory.exists()


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


def test_a_start_that_takes_too_long_names_its_own_limit(monkeypatch, tmp_path):
    (tmp_path / "slow_start.py").write_text("import time\n\n\ndef wait(options):\n    time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{HERE}")
    monkeypatch.setenv("SP_START_TIMEOUT_S", "2")
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ServiceSpec("echo_service:EchoService", before_torch="slow_start:wait"))
    with pytest.raises(WorkerTimeout, match=r"Rank 0, 1 made no progress for 2 s while starting\..* raise SP_START_TIMEOUT_S\."):
        pool.start()
    assert pool.over and not pool.workers.directory.exists()


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


def test_workers_wait_for_each_other_as_long_as_the_start_may_take(monkeypatch):
    monkeypatch.setenv("SP_START_TIMEOUT_S", "77")
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ServiceSpec("echo_service:EchoService"))
    monkeypatch.delenv("SP_START_TIMEOUT_S")
    pool.start()
    assert json.loads((pool.workers.directory / "config.json").read_text())["start_timeout_s"] == 77
    pool.shutdown()


def test_progress_resets_the_clock(monkeypatch, pool):
    monkeypatch.setenv("SP_TIMEOUT_S", "4")
    started = time.monotonic()
    assert pool.call("blocks", {"blocks": 50, "seconds": 0.1}) == "finished"
    assert time.monotonic() - started > 4


def test_two_pools_live_side_by_side(pool):
    other = make_pool("cpu:2")
    assert other.call("sum", None).item() == 3
    assert pool.call("sum", None).item() == 6
    other.shutdown()
    assert pool.call("sum", None).item() == 6


def test_the_private_directory_is_private(pool):
    assert pool.workers.directory.stat().st_mode & 0o777 == 0o700


def test_nothing_listens_beyond_loopback(pool):
    """Sockets of the workers and of this process: every listening one has a loopback address."""
    inodes = set()
    for pid in [*pool.workers.pids().values(), os.getpid()]:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor) if descriptor.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    listening = []
    for table, local in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append((table, fields[1].split(":")[0] == local))
    assert listening, "gloo listens somewhere; this test looks in the wrong place"
    assert all(is_local for _, is_local in listening)


def test_the_default_process_group_is_not_touched(pool):
    assert not torch.distributed.is_initialized()
