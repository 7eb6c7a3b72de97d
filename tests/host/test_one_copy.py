"""One copy of the weights in main memory: what all processes of a pool hold of a checkpoint, as the system counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign import parameters
from host import large
from host.graphs import Branch, Case, Link, compare, latent, load, run_sp, sample, text
from host.observe import pids, workers

from sp_core.demo.comfy_server import ComfyServer

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what processes hold together"),
]

DEVICES = "cpu:2"


@pytest.fixture(scope="module", autouse=True)
def checkpoints(comfyui: Path, base: Path) -> Iterator[None]:
    """For this module only: they take room on the disk."""
    folder = base / "models" / "diffusion_models"
    subprocess.run([sys.executable, large.__file__, str(comfyui), str(folder)], check=True)
    yield
    for name in large.FILES:
        (folder / f"{name}.safetensors").unlink()


def wan(name: str) -> Case:
    seed = time.monotonic_ns() % 10**9

    def case(branch: Branch) -> Link:
        model = branch.patch(load(branch, name))
        return sample(branch, model, text(branch, 4096), latent(branch, "1,16,3,10,14"), steps=1, seed=seed)

    return case


def held(process: int) -> dict[str, int]:
    """Bytes of a process's memory: all, where pages are shared its part of them, and those of no file."""
    fields = {line.split(":")[0]: line.split()[1] for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]}
    return {name: 1024 * int(fields[name]) for name in ("Pss", "Pss_Anon")}


def size(base: Path, name: str) -> int:
    return os.stat(base / "models" / "diffusion_models" / f"{name}.safetensors").st_size


@pytest.mark.parametrize("devices", parameters(plain=["cpu:2"], campaign=["cpu:4"]))
@pytest.mark.parametrize("name", large.FILES)
def test_a_pool_and_comfyui_hold_a_model_once(own: ComfyServer, base: Path, devices: str, name: str) -> None:
    run_sp(own, wan("tiny_wan_t2v"), devices)
    own.post("/free", {"unload_models": True, "free_memory": True})
    run_sp(own, wan("tiny_wan_t2v"), devices)
    before = {process: held(process)["Pss"] for process in (own.process.pid, *pids(own))}
    report = run_sp(own, wan(name), devices, weights="whole").report
    after = {process: held(process)["Pss"] for process in before}
    # in memory the weights are fp32, whatever the file has
    once, grown = size(base, large.FILES[0]), [after[process] - before[process] for process in before]
    print(f"\n{name} on {devices}: {once / 1e6:.0f} MB, grown by {', '.join(f'{bytes_ / 1e6:.0f}' for bytes_ in grown)} MB; {report}")
    assert sum(grown) <= 1.15 * once + 30e6, "some process holds a copy of its own"


# -- a rank's part of shared weights


@pytest.fixture(scope="module")
def larger(comfyui: Path, base: Path) -> Iterator[int]:
    """Bytes of a checkpoint of 2 GB, which is there meanwhile."""
    folder = base / "models" / "diffusion_models"
    subprocess.run([sys.executable, large.__file__, str(comfyui), str(folder), "larger"], check=True)
    yield size(base, large.LARGER)
    (folder / f"{large.LARGER}.safetensors").unlink()


class Peaks:
    """While it is entered: the most memory that each process holds in each phase of its work, in bytes above what it held before."""

    def __init__(self, server: ComfyServer) -> None:
        self._server, self._over = server, threading.Event()
        self._before = {process: held(process)["Pss"] for process in pids(server)}
        self._thread = threading.Thread(target=self._look)
        self.by_phase: dict[str, int] = {}

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def grown(self) -> list[int]:
        return [held(process)["Pss"] - before for process, before in self._before.items()]

    def _look(self) -> None:
        while not self._over.wait(0.05):
            # the phase is asked for on both sides of a look, which takes some milliseconds
            before, grown, after = workers(self._server), self.grown(), workers(self._server)
            phase = before[0]["phase"]
            if all(worker["phase"] == phase for worker in (*before, *after)):
                self.by_phase[phase] = max(*grown, self.by_phase.get(phase, 0))


def kinds(process: int) -> str:
    """What a process's memory is, for a person: MB by the kind of mapping."""
    found: dict[str, int] = {}
    kind = ""
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        first, *fields = line.split()
        if not first.endswith(":"):
            name = fields[4] if len(fields) > 4 else "anonymous"
            kind = name if name.startswith(("/memfd", "[heap]", "anon")) else "files"
            kind = "checkpoints" if name.endswith(".safetensors") else kind
        elif first == "Pss:":
            found[kind] = found.get(kind, 0) + int(fields[0])
    return ", ".join(f"{name} {kilobytes / 1e3:.0f}" for name, kilobytes in sorted(found.items(), key=lambda entry: -entry[1])[:6])


@pytest.mark.parametrize("devices", ["cpu:2", "cpu:4"])
def test_a_rank_holds_its_part_of_shared_weights(own: ComfyServer, larger: int, devices: str) -> None:
    run_sp(own, wan("tiny_wan_t2v"), devices)
    part, block = larger / int(devices.removeprefix("cpu:")), larger / large.LARGER_LAYERS
    with Peaks(own) as peaks:
        report = run_sp(own, wan(large.LARGER), devices, weights="shared").report
        grown = peaks.grown()
    found = ", ".join(f"{most / 1e6:.0f} while {phase}" for phase, most in peaks.by_phase.items())
    print(
        f"\n{devices}: {larger / 1e6:.0f} MB; each at most, MB: {found}, {max(grown) / 1e6:.0f} at the end; {kinds(pids(own)[0])}; {report}"
    )
    assert max(*grown, peaks.by_phase["computing"]) <= 1.05 * part + 2 * block
    assert peaks.by_phase["loading weights"] <= part + 3 * block


def test_a_branch_without_workers_gives_the_same_picture_afterwards(own: ComfyServer) -> None:
    """The MODEL of ComfyUI's own process is what it was, wherever its weights lie now."""
    for _ in range(2):
        compare(own, wan(large.FILES[0]), DEVICES)
