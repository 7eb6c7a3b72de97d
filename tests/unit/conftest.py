"""Unit tests start no process: they end within seconds, and what they show does not depend on the machine."""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

HERE = Path(__file__).resolve().parent
#: what Python tells an audit hook before it starts or becomes another process
STARTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}
_guarded = False


def refuse(*_: Any, **__: Any) -> NoReturn:
    pytest.fail("A unit test wants to start a process. Tests with processes belong to tests/processes or tests/distributed.")


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if _guarded and event in STARTS:
        refuse()


sys.addaudithook(_audit)  # stays as long as the interpreter: outside of unit tests it lets everything pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Guards a test of this folder and its fixtures, those of its module too."""
    global _guarded
    if HERE not in item.path.parents:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        # multiprocessing starts some of its processes past the audit hook
        patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        patch.setattr(multiprocessing.util, "spawnv_passfds", refuse)
        _guarded = True
        try:
            return (yield)
        finally:
            _guarded = False
