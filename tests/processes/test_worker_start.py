"""How the interpreter of a worker is started: flags, module path, threads, and an interpreter that is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sp_core.errors import SPError
from sp_core.pool.devices import WorkerDevice
from sp_core.pool.launcher import ServiceSpec, Workers

ROOT = Path(__file__).resolve().parents[2]
BOOTSTRAP = ROOT / "sp_core" / "pool" / "bootstrap.py"
FLAGS = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from sp_core.pool import launcher; print(*launcher._interpreter_flags())"
CHECK = """
import sys
from pathlib import Path
assert not [place for place in sys.path if place and Path(place).resolve() == Path({folder!r})], sys.path
assert [place for place in sys.path if place.endswith(".zip")], sys.path
sys.exit(7)
"""


@pytest.mark.parametrize("flag", ["-I", "-s", "-E"])
def test_a_worker_gets_the_flags_of_the_interpreter(flag: str) -> None:
    said = subprocess.run([sys.executable, flag, "-c", FLAGS], check=True, capture_output=True, text=True).stdout
    assert flag in said.split()


@pytest.mark.parametrize("flags", [[], ["-I"]], ids=str)
def test_a_worker_finds_what_its_interpreter_finds_and_not_its_own_folder(flags: list[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    check = CHECK.format(folder=str(BOOTSTRAP.parent))
    config.write_text(
        json.dumps({"before_torch": "builtins:exec", "service_options": check, "parent": os.getpid(), "directory": str(tmp_path)})
    )
    ended = subprocess.run([sys.executable, *flags, str(BOOTSTRAP), str(config), "0"], capture_output=True, text=True)
    assert ended.returncode == 7, ended.stderr


def test_an_interpreter_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers([WorkerDevice("cpu", 0), WorkerDevice("cpu", 1)], ServiceSpec("sp_core.host.worker.service:HostService"))
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    try:
        workers.start(shared_state="", requests="", replies=[], start_timeout_s=1)
    except SPError as error:
        sentence = str(error)
    finally:
        workers.stop(0)
        workers.remove_directory()
    assert "/nonexistent/python" in sentence
    assert "disk space" not in sentence and "cannot be written" not in sentence, sentence
