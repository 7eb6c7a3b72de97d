"""Whoever removes directories of pools that are gone leaves that of a pool in another container alone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sp_core.pool.devices import WorkerDevice
from sp_core.pool.launcher import ServiceSpec, Workers

ROOT = Path(__file__).resolve().parents[2]
SWEEP = "import sp_core.pool.launcher as launcher; launcher.remove_stale_directories()"


def test_a_start_in_another_container_leaves_a_running_pool_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("a PID namespace needs more rights than this user has")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    workers = Workers([WorkerDevice("cpu", 0), WorkerDevice("cpu", 1)], ServiceSpec("sp_core.host.worker.service:HostService"))
    assert workers.directory.exists()
    subprocess.run([*wrapper, sys.executable, "-c", SWEEP], check=True, cwd=ROOT)
    assert workers.directory.exists()
