"""One copy of the weights in main memory: what all processes of a pool hold of a checkpoint, as the system counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign import parameters
from host import large
from host.graphs import Branch, Case, Link, compare, latent, load, run_sp, sample, text
from host.observe import pids

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


@pytest.mark.parametrize("devices", parameters(plain=["cpu:2"], campaign=["cpu:4"]))
def test_a_rank_holds_its_part_of_shared_weights(own: ComfyServer, base: Path, devices: str) -> None:
    run_sp(own, wan("tiny_wan_t2v"), devices)
    before = {process: held(process)["Pss"] for process in pids(own)}
    report = run_sp(own, wan(large.FILES[0]), devices, weights="shared").report
    total, ranks = size(base, large.FILES[0]), int(devices.removeprefix("cpu:"))
    grown = [held(process)["Pss"] - before[process] for process in before]
    print(f"\n{devices}: {total / 1e6:.0f} MB, grown by {', '.join(f'{bytes_ / 1e6:.0f}' for bytes_ in grown)} MB; {report}")
    assert max(grown) <= 1.05 * total / ranks + 2 * total / large.LAYERS + 30e6


def test_a_branch_without_workers_gives_the_same_picture_afterwards(own: ComfyServer) -> None:
    """The MODEL of ComfyUI's own process is what it was, wherever its weights lie now."""
    for _ in range(2):
        compare(own, wan(large.FILES[0]), DEVICES)
