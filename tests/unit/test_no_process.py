"""The guard of this folder: whatever way a process is started, the test that does it fails."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory

import pytest


def start(method: str) -> None:
    multiprocessing.get_context(method).Process(target=print).start()


WAYS: dict[str, Callable[[], object]] = {
    "run": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "system": lambda: os.system("true"),
    "fork": lambda: os.fork() or os._exit(0),
    "posix_spawn": lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ),
    "a forked worker": lambda: start("fork"),
    "a spawned worker": lambda: start("spawn"),
    "a worker of a fork server": lambda: start("forkserver"),
    "the tracker of shared memory": lambda: SharedMemory(create=True, size=8),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_process_is_started(way: str) -> None:
    def attempt() -> None:
        try:
            WAYS[way]()
        except Exception:
            pytest.fail("the guard can be caught like any error, so code under test could hide it")

    with pytest.raises(pytest.fail.Exception, match="wants to start a process"):
        attempt()
