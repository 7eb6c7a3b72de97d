"""What a worker's environment and the sentences of its start say, whatever its device."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from pathlib import Path

import pytest

from sp_core.pool import launcher
from sp_core.pool.devices import WorkerDevice
from sp_core.pool.launcher import ServiceSpec, Workers


@pytest.mark.parametrize(
    ("kind", "users", "threads"),
    [("cuda", None, "4"), ("cuda", "6", "6"), ("xpu", None, "4"), ("cpu", None, "4"), ("cpu", "6", "4")],
)
def test_workers_share_the_cores(kind: str, users: str | None, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user has set for ComfyUI holds for each GPU's worker; CPU workers share the cores whatever it says."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
        if users is not None:
            monkeypatch.setenv(name, users)
    workers = Workers([WorkerDevice(kind, 0), WorkerDevice(kind, 1)], ServiceSpec("module:Class"))
    environment = workers._environment(1)
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == (threads, threads)
    workers.remove_directory()


@pytest.mark.parametrize(
    ("number", "file", "says"),
    [
        (errno.ENOENT, sys.executable, "Restart ComfyUI"),
        (errno.EACCES, sys.executable, "Restart ComfyUI"),
        (errno.EAGAIN, None, "limit of processes"),
        (errno.ENOMEM, None, "limit of processes"),
    ],
)
def test_the_way_out_of_a_start_that_failed(number: int, file: str | None, says: str) -> None:
    assert says in launcher._way_out(OSError(number, os.strerror(number), file))
