"""``python -m sp_core``, started as a user starts it; and what importing the package does to a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sp_core", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300, env=os.environ | environment)


def test_command_line_says_what_it_can_do() -> None:
    asked, nothing, wrong = run("--help"), run(), run("levitate")
    assert asked.returncode == 0
    assert nothing.returncode == wrong.returncode == 2
    for answer in (asked.stdout, nothing.stderr, wrong.stderr):
        assert all(command in answer for command in ("demo", "bench", "doctor"))


def test_bench_says_what_it_can_measure() -> None:
    shown = run("bench", "--help").stdout
    assert [name for name in ("exchange", "step", "overhead", "memory") if name not in shown] == []


def test_command_line_needs_no_host(tmp_path: Path) -> None:
    """The demo says that it found no ComfyUI, and a wrong device list is a sentence."""
    done = run("demo", "--devices", "cpu:0", COMFYUI_PATH=str(tmp_path))
    assert done.returncode == 2
    assert "'cpu:0' asks for 0 CPU workers" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_doctor_prints_json_and_measures_a_link() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    size = len(told["links"]["devices"])
    assert size >= 2 and told["links"]["transport"]
    assert all((told["links"]["links"][a][b] > 0) == (a != b) for a in range(size) for b in range(size))
    assert told["verdict"] and told["versions"]["torch"]


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys; before = set(sys.modules); import sp_core; print([m for m in sys.modules if m not in before and 'torch' in m])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
