"""The pool with real worker processes: calls, what they cost, failures that it outlives."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from distributed.pools import make_pool

from sp_core.pool import console
from sp_core.pool.errors import WireError, WorkerFailed

pytestmark = pytest.mark.usefixtures("echo_service")


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


def test_an_answer_that_cannot_be_sent_is_a_failure_of_its_request(pool):
    with pytest.raises(WorkerFailed, match="Rank 0 failed: cannot send 'function'"):
        pool.call("unsendable", None)
    assert pool.call("sum", None).item() == 6


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
