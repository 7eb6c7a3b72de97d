"""How the interpreter of a worker is started: flags, module path, threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
