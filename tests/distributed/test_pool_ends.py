"""Nothing is left of a pool when the program that made it ends or becomes another program, whatever the pool is doing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from campaign import CAMPAIGN, parameters, within
from leftovers import alive, left, memory_files

HERE = Path(__file__).parent
ROUNDS = 20 if CAMPAIGN else 1
#: in this time all is gone
GONE_S = within(5.0)

PARENT = """
import atexit, os, sys, threading, time
# registered first, so called last
atexit.register(lambda: print("ended" if pool.over else "left open", flush=True))
sys.path[:0] = [{root!r}]
os.environ["PYTHONPATH"] = {here!r}
from sp_core.pool.coordinator import Pool
from sp_core.pool.devices import parse_devices
from sp_core.pool.launcher import ServiceSpec
pool = Pool(parse_devices("cpu:2", "cpu", 0), ServiceSpec("echo_service:EchoService"))
pool.start()
if {busy}:
    threading.Thread(target=lambda: pool.call("stall", [0, 60]), daemon=True).start()
    time.sleep(0.3)
print(*pool.workers.pids().values(), pool.workers.directory, flush=True)
word = sys.stdin.readline()
if word == "close\\n":
    # listeners hear the answers, and are about to wait again when the program ends
    pool.call("echo", 1)
if word == "exec\\n":
    os.execv(sys.executable, [sys.executable, "-c", "import time; print('replaced', flush=True); time.sleep(60)"])
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("how", "busy"),
    parameters(
        plain=[("exec", True), (signal.SIGKILL, True), (signal.SIGTERM, True), ("close", False)],
        campaign=[("exec", False), (signal.SIGKILL, False)],
    ),
    ids=str,
)
def test_nothing_is_left_of_a_pool(how: str | signal.Signals, busy: bool) -> None:
    code = PARENT.format(root=str(HERE.parents[1]), here=str(HERE), busy=busy)
    for _ in range(ROUNDS):
        command = [sys.executable, "-c", code]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, **pipes, text=True) as parent:  # type: ignore[call-overload]
            assert parent.stdin is not None and parent.stdout is not None and parent.stderr is not None
            *numbers, folder = parent.stdout.readline().split()
            workers, directory = list(map(int, numbers)), Path(folder)
            files = memory_files([parent.pid])
            assert len(workers) == 2 and files and all(map(alive, workers)) and directory.exists(), "the pool does not run"
            if isinstance(how, signal.Signals):
                parent.send_signal(how)
            else:
                parent.stdin.write(f"{how}\n")
                parent.stdin.flush()
            if how == "exec":
                assert parent.stdout.readline() == "replaced\n"
            else:
                parent.wait(within(30))
            if how == "close":
                # a listener that comes back from torch's code while Python ends aborts the program
                assert (parent.returncode, parent.stdout.read()) == (0, "ended\n"), parent.stderr.read()
            deadline = time.monotonic() + GONE_S
            while left(workers, files, [directory]) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert left(workers, files, [directory]) == []
            assert how != "exec" or parent.poll() is None, "the program that took the place has ended"
            parent.kill()
