"""What goes wrong with one rank: a sentence that names it, a pool for the next prompt, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import CAMPAIGN, HANGS_S, parameters, within
from host.graphs import Branch, Link, read
from host.observe import (
    alive,
    children,
    count,
    dice,
    failure,
    nothing_is_left,
    open_things,
    pids,
    private_directories,
    run,
    status,
    video,
    wait_for,
    workers,
)

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

#: many of these tests start workers anew
WORLD_SIZE = count(2, 3)
DEVICES, LAST = f"cpu:{WORLD_SIZE}", WORLD_SIZE - 1
#: what a person waits for without complaint, and some room
ERROR_S = within(15.0)
TIMEOUT_S = 10


@pytest.fixture(scope="module")
def own_environment(temporary: Path) -> dict[str, str]:
    return {"TMPDIR": str(temporary), "SP_TIMEOUT_S": str(TIMEOUT_S)}


@pytest.fixture(scope="module")
def expected(own: ComfyServer) -> torch.Tensor:
    return run(own, *video(None)).parts[0]


def works(server: ComfyServer, expected: torch.Tensor) -> None:
    torch.testing.assert_close(run(server, *video(DEVICES)).parts[0], expected, rtol=0, atol=2e-4)


def nothing_left(server: ComfyServer, temporary: Path, old: list[int]) -> None:
    """Of the workers ``old``: no process, no private directory beyond the living pool's."""
    wait_for(lambda: not any(map(alive, old)), 5, f"the processes {old} to end")
    wait_for(lambda: set(children(server.process.pid)) <= set(pids(server)), 5, "child processes that are no workers to end")
    wait_for(lambda: len(private_directories(temporary)) == bool(pids(server)), 5, "the private directory to go")


def fault(kind: str, rank: int, call: int = 4) -> Callable[[Branch, Link], Link]:
    return lambda branch, model: branch.add("SPTestFault", model=model, rank=rank, call=call, kind=kind)[0]


#: one that is answered, one that ends the process, one that says nothing
FAULTS = [
    ("device memory", 1, r"Rank 1 failed: out of memory on its device \(CUDA out of memory\. Tried to allocate 20\.00 GiB"),
    ("exit", LAST, rf"The worker of rank {LAST} ended unexpectedly \(exit code 7"),
    ("hang", 1, f"Rank 1 made no progress for {TIMEOUT_S} s while computing a forward of WanModel"),
]
MORE_FAULTS = [
    ("main memory", LAST, f"Rank {LAST} failed: out of main memory"),
    ("error", 0, "Rank 0 failed: a fault that a test put there"),
    ("device lost", 1, r"Rank 1 failed: its device does not answer any more \(CUDA error: unspecified launch failure\)"),
]


@pytest.mark.parametrize(
    ("kind", "rank", "sentence"), parameters(plain=FAULTS, campaign=MORE_FAULTS), ids=[kind for kind, *_ in FAULTS + MORE_FAULTS]
)
def test_one_rank_fails(own: ComfyServer, expected: torch.Tensor, temporary: Path, kind: str, rank: int, sentence: str) -> None:
    works(own, expected)
    before = pids(own)
    text, seconds = failure(own, own.queue(video(DEVICES, change=fault(kind, rank), seed=time.monotonic_ns() % 10**9)[0]))
    print(f"\n{kind}: {seconds:.1f} s: {text}")
    assert re.search(sentence, text), text
    assert "\n" not in text.strip()
    assert seconds < ERROR_S + (TIMEOUT_S if kind == "hang" else 0)
    if kind in ("device lost", "exit", "hang"):
        nothing_left(own, temporary, before)
    trace = own.log() + "".join(path.read_text() for path in temporary.glob("comfyui-sp-rank*.log"))
    if kind == "hang":
        assert "in _fail" in trace, "the log does not say where the rank stood"
    elif kind != "exit":
        assert f"[SP rank {rank}]" in trace and "Traceback" in trace and "in _fail" in trace
    works(own, expected)


# -- kill -9 at random moments --------------------------------------------------------------


def _slow(branch: Branch, model: Link) -> Link:
    return branch.add("SPTestSlowInWorkers", model=model, seconds=1.5)[0]


def _phase(server: ComfyServer, *names: str) -> Callable[[], Any]:
    return lambda: [worker for worker in workers(server) if worker["phase"] in names]


def _kill(server: ComfyServer, chance: Any) -> int:
    """A random worker's rank, killed."""
    there = [worker for worker in workers(server) if worker["alive"] and worker["pid"]]
    chosen = chance.choice(there)
    os.kill(chosen["pid"], signal.SIGKILL)
    return int(chosen["rank"])


MOMENTS = ("step", "start-up", "replay", "idle", "load", "shutdown")


def test_a_rank_is_killed_at_a_random_moment(own: ComfyServer, expected: torch.Tensor, temporary: Path) -> None:
    chance, times = dice(), []
    works(own, expected)
    baseline: dict[str, int] | None = None
    for number in range(count(1, 30)):
        moment = MOMENTS[number % len(MOMENTS)]
        seed = 5000 + number
        if moment == "start-up":
            own.run({"1": {"class_type": "SPRelease", "inputs": {"what": "workers"}}})
            prompt_id = own.queue(video(DEVICES, seed=seed)[0])
            wait_for(lambda: len(pids(own)) == WORLD_SIZE, 60, "the processes to start")
            time.sleep(chance.uniform(0, 6))
        elif moment in ("replay", "load"):
            works(own, expected)
            prompt_id = own.queue(video(DEVICES, "tiny_wan_t2v_low", change=_slow if moment == "replay" else lambda _, m: m, seed=seed)[0])
            wait_for(_phase(own, "running the graph", "loading weights", "computing"), 60, moment)
            time.sleep(chance.uniform(0, 1) if moment == "replay" else 0)
        elif moment == "step":
            works(own, expected)
            prompt_id = own.queue(video(DEVICES, shape="1,16,5,20,28", steps=60, seed=seed)[0])
            wait_for(_phase(own, "computing"), 60, "the first step")
            time.sleep(chance.uniform(0, 1.5))
        else:
            works(own, expected)
            prompt_id = ""
        old = pids(own)
        started, told = time.monotonic(), ""
        if moment == "shutdown":
            prompt_id = own.queue({"1": {"class_type": "SPRelease", "inputs": {"what": "workers"}}})
        with contextlib.suppress(IndexError, ProcessLookupError):  # at the end of its life it may be gone already
            rank = _kill(own, chance)
        if prompt_id and moment != "shutdown":
            try:
                own.wait(prompt_id, 60)
            except PromptFailed as error:
                text = str(error)
                times.append(time.monotonic() - started)
                told = f", error after {times[-1]:.1f} s"
                assert f"worker of rank {rank} ended unexpectedly (signal 9" in text, text
                assert times[-1] < ERROR_S, f"{moment}: the error took {times[-1]:.1f} s"
            else:
                assert moment in ("start-up", "load"), f"{moment}: rank {rank} was killed and the prompt did not fail"
        elif prompt_id:
            own.wait(prompt_id, 60)
        else:
            wait_for(lambda: status(own)["state"] == "none", 10, "the pool to notice a death between prompts")
        if not (moment == "load" and pids(own) == old):  # a load may be over before it is hit, and the next prompt notices
            nothing_left(own, temporary, old)
        works(own, expected)
        now = open_things(own.process.pid)
        baseline = baseline or now
        assert now["memory files"] <= baseline["memory files"], (baseline, now)
        assert now["sockets"] <= baseline["sockets"] + 4, (baseline, now)  # those of HTTP come and go
        print(f"{moment}: rank {rank} killed{told}")
    print(f"\n{number + 1} kills, longest error {max(times):.1f} s")


# -- two hosts on one machine ---------------------------------------------------------------


@pytest.fixture(scope="module")
def others_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("other")


@pytest.fixture(scope="module")
def other(comfyui: Path, base: Path, others_directory: Path) -> Iterator[ComfyServer]:
    with ComfyServer(comfyui, base, "--cpu", environment={"TMPDIR": str(others_directory)}) as server:
        yield server


@pytest.mark.campaign
def test_two_hosts_on_one_machine(own: ComfyServer, other: ComfyServer) -> None:
    """Both sample at the same time."""
    prompts = {}
    for server, seed in ((own, 61), (other, 62)):
        stock = run(server, *video(None, seed=seed)).parts[0]
        prompt, node = video("cpu:2", seed=seed)
        prompts[server] = (server.queue(prompt), node, stock)
    for server, (prompt_id, node, stock) in prompts.items():
        mine = read(server.wait(prompt_id)["outputs"][node]).parts[0]
        torch.testing.assert_close(mine, stock, rtol=0, atol=2e-4)
    assert not set(pids(own)) & set(pids(other))


def leave(server: ComfyServer, directory: Path, how: signal.Signals) -> None:
    """In the middle of a step."""
    server.queue(video("cpu:2", shape="1,16,5,20,28", steps=60)[0])
    wait_for(_phase(server, "computing"), 120, "the first step")
    with nothing_is_left(server, directory):
        server.process.send_signal(how)
    server.process.wait(HANGS_S)  # its own end is Python's, and takes long on a busy machine


def test_workers_leave_with_their_host_that_is_killed(
    own: ComfyServer, other: ComfyServer, others_directory: Path, expected: torch.Tensor
) -> None:
    run(own, *video("cpu:2", seed=63))
    before = pids(own)
    leave(other, others_directory, signal.SIGKILL)
    assert pids(own) == before and all(map(alive, before)), "the other host's workers left too"


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=str)
def test_workers_leave_with_their_host_whatever_ends_it(comfyui: Path, base: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C waits for no step either, and ComfyUI then ends as it does by itself: without being aborted."""
    for _ in range(count(1, 20)):
        with ComfyServer(comfyui, base, "--cpu", environment={"TMPDIR": str(tmp_path)}) as server:
            leave(server, tmp_path, how)
        assert server.process.returncode == (-how if how is signal.SIGKILL else 0)


@pytest.mark.timeout(3600 if CAMPAIGN else 600)
def test_nothing_is_left_of_workers_that_are_released(own: ComfyServer, temporary: Path, expected: torch.Tensor) -> None:
    for _ in range(count(1, 20)):
        works(own, expected)
        with nothing_is_left(own, temporary):
            own.run({"1": {"class_type": "SPRelease", "inputs": {"what": "workers"}}})


# -- small disks ------------------------------------------------------------------------------


def _mounted(*commands: str) -> tuple[str, ...]:
    """Runs the server with mounts of its own."""
    wrapper = ("unshare", "-m", "sh", "-c", f'{" && ".join(commands)} && exec "$@"', "sh")
    if subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs more rights than this user has")
    return wrapper


@pytest.mark.campaign
def test_a_full_disk_is_named_and_little_room_is_enough(comfyui: Path, base: Path, tmp_path: Path, expected: torch.Tensor) -> None:
    """8 MB of disk, full at first, and 64 MB of /dev/shm, as in a container: the request of this prompt alone is larger."""
    wrapper = _mounted(
        "mount -t tmpfs -o size=64m tmpfs /dev/shm",
        f"mount -t tmpfs -o size=8m tmpfs {tmp_path}",
        f"head -c 7M /dev/zero > {tmp_path}/filler",
    )
    # the compiled exchange is built elsewhere
    with ComfyServer(comfyui, base, "--cpu", environment={"TMPDIR": str(tmp_path)}, wrapper=wrapper) as server:
        text, _ = failure(server, server.queue(video("cpu:2")[0]))
        assert re.search(f"The workers cannot be started: {tmp_path} cannot be written .*Free some disk space", text), text
        # the mount is the server's own: reach it through that process
        Path(f"/proc/{server.process.pid}/root{tmp_path}/filler").unlink()
        torch.testing.assert_close(run(server, *video("cpu:2")).parts[0], expected, rtol=0, atol=2e-4)


def test_what_an_unclean_exit_left_is_removed(own: ComfyServer, expected: torch.Tensor, temporary: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale = temporary / f"comfyui-sp-{gone.pid}-left"
    stale.mkdir(mode=0o700)
    (stale / "control").write_text("rendezvous of a pool that is no more")
    os.utime(stale, (0, 0))  # long ago: a directory that is being made has no lock yet either
    own.run({"1": {"class_type": "SPRelease", "inputs": {"what": "workers"}}})
    works(own, expected)
    assert not stale.exists()
