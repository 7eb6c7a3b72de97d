"""Two models with shared weights, round by round: other LoRAs, other numbers of workers, cancels and kills between, and nothing grows."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from host.graphs import Branch, Case, Graph, Link, compare, load, sample, save
from host.graphs import latent as empty
from host.graphs import text as words
from host.observe import count, dice, nothing_is_left, pids, status, wait_for, workers
from host.test_shared_weights import experts, is_shared, with_lora

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def own_environment(temporary: Path) -> dict[str, str]:
    # a server that dies is to say where
    return {"TMPDIR": str(temporary), "PYTHONFAULTHANDLER": "1"}


def held_mb(process: int) -> float:
    """What a process holds, of shared pages its part."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1e3
    raise AssertionError("the system does not tell")


def long(strength: float) -> Case:
    """Never over before it is cancelled."""

    def case(branch: Branch) -> Link:
        model = branch.patch(with_lora(branch, load(branch, "tiny_wan_t2v"), strength))
        return sample(branch, model, words(branch, 4096), empty(branch, "1,16,5,20,28"), steps=60)

    case.__name__ = "long"
    return case


def queued(server: ComfyServer, case: Case, devices: str) -> str:
    graph = Graph()
    save(Branch(graph, devices, {"weights": "shared"}), case, "ended early")
    return server.queue(graph.prompt)


def ended_by(server: ComfyServer, devices: str, kill: bool, strength: float, chance: random.Random) -> None:
    """A prompt that is cancelled, or one of whose workers is killed, at a random moment of loading or computing."""
    prompt_id = queued(server, long(strength), devices)
    wait_for(lambda: any(worker["phase"] in ("loading weights", "computing") for worker in workers(server)), 60, "the model to come")
    time.sleep(chance.uniform(0, 1))
    if kill:
        os.kill(chance.choice(pids(server)), signal.SIGKILL)
    else:
        server.post("/interrupt", {})
    with pytest.raises(PromptFailed, match="ended unexpectedly" if kill else "interrupted"):
        server.wait(prompt_id)


def test_rounds_of_two_models_with_other_loras_cancels_and_kills_between(own: ComfyServer, temporary: Path) -> None:
    chance, held = dice(), {"ComfyUI": [], "a worker": []}
    for number in range(count(4, 10)):
        devices, strength = f"cpu:{(2, 3)[number % 2]}", 0.2 + 0.1 * number
        is_shared(compare(own, experts(strength), devices, weights="shared").sp.report, devices)
        held["ComfyUI"].append(held_mb(own.process.pid))
        held["a worker"].append(max(held_mb(process) for process in pids(own)))
        # workers of both models, so that a kill and a cancel meet each number of them
        ended_by(own, devices, kill=number % 4 >= 2, strength=strength, chance=chance)
    print("\n" + "; ".join(f"{who}, MB: {', '.join(f'{value:.0f}' for value in values)}" for who, values in held.items()))
    compare(own, experts(0.7), "cpu:2", weights="shared")
    for values in held.values():
        # the first rounds of either number of workers load what stays
        assert max(values[-2:]) <= 1.05 * max(values[2:4]) + 5, held
    with nothing_is_left(own, temporary):
        own.run({"1": {"class_type": "SPRelease", "inputs": {"what": "workers"}}})
    assert not any(worker["alive"] for worker in status(own)["workers"])
