"""Workers that nobody uses end after the idle time that is set, and never in the middle of something."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from host.observe import Change, alive, pids, private_directories, run, status, video, wait_for, workers

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

IDLE_S = 3.0


@pytest.fixture(scope="module")
def own_environment(temporary: Path) -> dict[str, str]:
    return {"TMPDIR": str(temporary), "SP_IDLE_S": str(IDLE_S)}


@pytest.mark.campaign
def test_idle_workers_end_and_the_next_prompt_starts_them_again(own: ComfyServer, temporary: Path) -> None:
    expected = run(own, *video(None)).parts[0]
    torch.testing.assert_close(run(own, *video("cpu:2")).parts[0], expected, rtol=0, atol=2e-4)
    first = pids(own)
    assert len(first) == 2
    wait_for(lambda: not any(map(alive, first)), 60, "the idle workers to end")
    wait_for(lambda: not private_directories(temporary), 10, "their folder to go")
    assert status(own)["state"] == "none"
    assert "idle for 3 s" in own.log()
    again = run(own, *video("cpu:2", seed=2)).parts[0]
    torch.testing.assert_close(again, run(own, *video(None, seed=2)).parts[0], rtol=0, atol=2e-4)
    assert not set(pids(own)) & set(first)


@pytest.mark.campaign
def test_a_block_that_outlasts_the_idle_time_is_computed_and_one_that_was_cancelled_too(own: ComfyServer) -> None:
    """The second block belongs to no prompt any more."""

    def slow(call: int) -> Change:
        return lambda branch, model: branch.add("SPTestFault", model=model, rank=0, call=call, kind="slow")[0]

    expected = run(own, *video(None, seed=3)).parts[0]
    torch.testing.assert_close(run(own, *video("cpu:2", change=slow(3), seed=3)).parts[0], expected, rtol=0, atol=2e-4)
    before = pids(own)
    prompt_id = own.queue(video("cpu:2", change=slow(4), seed=4)[0])
    wait_for(lambda: any(worker["phase"] == "computing" for worker in workers(own)), 60, "the step to begin")
    time.sleep(1.0)
    own.post("/interrupt", {})
    with pytest.raises(PromptFailed, match="interrupted"):
        own.wait(prompt_id)
    while any(worker["phase"] == "computing" for worker in workers(own)):
        assert all(map(alive, before)), "the workers were ended in the middle of a block"
        time.sleep(0.05)
    wait_for(lambda: not any(map(alive, before)), 60, "the idle workers to end")
