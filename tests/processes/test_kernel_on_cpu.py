"""The GPU's exchange kernel (csrc/all2all_heads.cuh), compiled for the CPU and run thread by thread."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from cxx import compiler

from sp_core.comm.native.cuda import CLaunch, CStatus
from sp_core.comm.native.cuda_runtime import SLOTS_OFFSET


@pytest.fixture(scope="module")
def kernel_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("kernel") / "heads_on_cpu"
    source = Path(__file__).with_name("heads_on_cpu.cpp")
    flags = ["-std=c++20", "-O1", "-pthread", "-DSP_THREADS=16", "-w"]
    subprocess.run([found, *flags, str(source), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize(("world_size", "exchanges"), [(1, 20), (2, 60), (3, 60), (5, 20)])
def test_kernel_delivers_every_byte_and_overwrites_nothing(kernel_on_cpu: Path, world_size: int, exchanges: int) -> None:
    ran = subprocess.run([str(kernel_on_cpu), str(world_size), str(exchanges), "1"], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "clean\n"), ran.stdout + ran.stderr


def test_python_and_the_kernel_mean_the_same_structures(kernel_on_cpu: Path) -> None:
    sizes = subprocess.run([str(kernel_on_cpu), "sizes"], capture_output=True, text=True, check=True).stdout
    assert sizes.split() == [str(size) for size in (ctypes.sizeof(CLaunch), ctypes.sizeof(CStatus), SLOTS_OFFSET)]


def test_kernel_that_waits_for_a_lost_rank_ends_when_called_off_and_names_it(kernel_on_cpu: Path) -> None:
    ran = subprocess.run([str(kernel_on_cpu), "3", "5", "1", "away"], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "clean\n"), ran.stdout + ran.stderr
