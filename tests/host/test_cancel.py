"""Cancel: takes effect inside a step, keeps workers and weights, and never waits for a long block or a slow loader."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from campaign import parameters, within
from host.observe import count, dice, pids, run, status, video, wait_for, workers

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

#: 1 s on an idle machine
BOUND_S = within(5.0)
#: long enough that a prompt never ends before it is cancelled
LONG = {"shape": "1,16,5,20,28", "steps": 60}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """What waits for this file lasts until the test makes it, however fast the machine is."""
    path = tmp_path / "open"
    yield path
    path.touch()


def cancel(server: ComfyServer, prompt_id: str) -> float:
    """Seconds from the button to the end of the prompt."""
    started = time.monotonic()
    server.post("/interrupt", {})
    with pytest.raises(PromptFailed, match="interrupted"):
        server.wait(prompt_id)
    return time.monotonic() - started


def test_the_status_answers_at_all_times(own: ComfyServer) -> None:
    """During start-up, loading and sampling: the route waits for nobody."""
    own.run({"1": {"class_type": "SPRelease", "inputs": {"what": "workers"}}})
    slowest, states, done = 0.0, set(), threading.Event()

    def ask() -> None:
        nonlocal slowest
        while not done.is_set():
            started = time.monotonic()
            with contextlib.suppress(OSError):
                answer = status(own)
                states.update({answer["state"], *(worker["phase"] for worker in answer["workers"])})
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.005)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        run(own, *video("cpu:2", seed=31, steps=20))  # long enough to be seen computing on a busy machine
    finally:
        done.set()
        asking.join()
    print(f"\nslowest answer {slowest:.2f} s")
    assert {"starting", "ready", "computing"} <= states
    assert slowest < BOUND_S
    model = status(own)["models"][0]
    assert model["forwards"] and model["last_forwards_s"] and model["on_devices"]


@pytest.mark.parametrize("devices", parameters(plain=["cpu:2"], campaign=["cpu:3", "cpu:4"]))
def test_cancel_at_random_moments_of_sampling(own: ComfyServer, devices: str) -> None:
    chance, times = dice(), []
    expected = run(own, *video(None)).parts[0]
    torch.testing.assert_close(run(own, *video(devices)).parts[0], expected, rtol=0, atol=2e-4)
    before = pids(own)
    for number in range(count(3, 20)):
        prompt_id = own.queue(video(devices, seed=1000 + number, **LONG)[0])
        time.sleep(chance.uniform(0.2, 2.5))
        times.append(cancel(own, prompt_id))
        assert pids(own) == before, "workers were lost to a cancel"
        assert all(worker["weight_bytes"] for worker in workers(own)), "weights were lost to a cancel"
        if number % 5 == 2:
            again = run(own, *video(devices, seed=2000 + number))
            torch.testing.assert_close(again.parts[0], run(own, *video(None, seed=2000 + number)).parts[0], rtol=0, atol=2e-4)
    print(f"\ncancel on {devices}: median {median(times):.2f} s, longest {max(times):.2f} s of {len(times)}")
    assert max(times) < BOUND_S


def test_cancel_does_not_wait_for_a_slow_loader(own: ComfyServer, gate: Path) -> None:
    run(own, *video("cpu:2"))
    before = pids(own)
    too_long = 90.0

    def slow(branch: Any, model: Any) -> Any:
        model = branch.add("SPTestSlowInWorkers", model=model, seconds=0.1, until=str(gate))[0]
        for _ in range(2):
            model = branch.add("SPTestSlowInWorkers", model=model, seconds=too_long / 2)[0]
        return model

    prompt_id = own.queue(video("cpu:2", change=slow, seed=11)[0])
    wait_for(lambda: any(worker["phase"] == "running the graph" for worker in workers(own)), 60, "the replay to begin")
    # the gate is shut: a cancel that waited for the loader would not come back
    print(f"\ncancel in a loader: {cancel(own, prompt_id):.2f} s")
    # the workers end the node that they are in, and none behind it
    started = time.monotonic()
    gate.touch()
    expected = run(own, *video(None, seed=12)).parts[0]
    torch.testing.assert_close(run(own, *video("cpu:2", seed=12)).parts[0], expected, rtol=0, atol=2e-4)
    assert time.monotonic() - started < too_long, "the replay went on to its end"
    assert pids(own) == before


def test_cancel_in_a_long_block_of_a_model_that_is_not_kept(own: ComfyServer, gate: Path) -> None:
    """The weights leave when the block is over, and nobody waits for that."""

    def slow(branch: Any, model: Any) -> Any:
        return branch.add("SPTestFault", model=model, rank=0, call=3, kind=f"until {gate}")[0]

    run(own, *video("cpu:2"))
    prompt_id = own.queue(video("cpu:2", change=slow, keep_loaded="never", seed=41)[0])
    wait_for(lambda: any(worker["phase"] == "computing" for worker in workers(own)), 60, "the step to begin")
    time.sleep(1.0)
    # the gate is shut: a cancel that waited for the block would not come back
    print(f"\ncancel in a long block: {cancel(own, prompt_id):.2f} s")
    held = lambda: [worker["weight_bytes"] for worker in workers(own)]  # noqa: E731
    assert min(held()) > 0, "the weights left in the middle of a block"
    gate.touch()
    wait_for(lambda: held() == [0, 0], 20, "the weights to leave")


def test_cancel_while_the_workers_start(own: ComfyServer) -> None:
    own.run({"1": {"class_type": "SPRelease", "inputs": {"what": "workers"}}})
    prompt_id = own.queue(video("cpu:2", seed=21)[0])
    wait_for(lambda: len(pids(own)) == 2, 60, "the processes")
    starting = pids(own)
    assert status(own)["state"] == "starting"
    assert cancel(own, prompt_id) < BOUND_S
    expected = run(own, *video(None, seed=21)).parts[0]
    torch.testing.assert_close(run(own, *video("cpu:2", seed=21)).parts[0], expected, rtol=0, atol=2e-4)
    assert pids(own) == starting, "the workers that were starting were thrown away"
