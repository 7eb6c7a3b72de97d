"""The lock on a private directory, seen from another process while its owner lives, forks, execs and ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sp_core.pool.owner_lock import OwnerWatch

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import os, sys, time
from pathlib import Path
from sp_core.pool.owner_lock import OwnerLock, OwnerWatch
directory = Path(sys.argv[1])
lock = OwnerLock(directory)
print("held", flush=True)
for line in sys.stdin:
    if line == "ask\\n":
        watch = OwnerWatch(directory)
        assert watch.owner_is_there() is None
        watch.close()
    if line == "fork\\n" and os.fork() == 0:
        os.close(1)
        time.sleep(30)
        os._exit(0)
    if line == "exec\\n":
        os.execv(sys.executable, [sys.executable, "-c", "import sys; print('replaced', flush=True); sys.stdin.read()"])
    if line == "end\\n":
        os._exit(0)
    print("done", flush=True)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def tell(owner: subprocess.Popen[str], word: str) -> str:
    assert owner.stdin is not None and owner.stdout is not None
    owner.stdin.write(f"{word}\n")
    owner.stdin.flush()
    return owner.stdout.readline().strip()


def test_the_lock_is_held_while_the_owner_asks_after_it(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    watch = OwnerWatch(tmp_path)
    assert watch.owner_is_there() is True
    assert tell(owner, "ask") == "done"
    assert watch.owner_is_there() is True
    watch.close()


@pytest.mark.parametrize("word", ["exec", "end"])
def test_the_lock_falls_though_a_forked_child_lives_on(owner: subprocess.Popen[str], tmp_path: Path, word: str) -> None:
    watch = OwnerWatch(tmp_path)
    assert tell(owner, "fork") == "done"
    assert watch.owner_is_there() is True
    assert tell(owner, word) == {"exec": "replaced", "end": ""}[word]
    assert watch.owner_is_there() is False
    watch.close()
