"""Starts the worker processes and a private directory for them; ends both.

Each worker leads a POSIX session of its own: Ctrl-C in the coordinator's terminal does not reach it, so that the coordinator
ends it in order, and a kill of its process group takes along what it started. When the coordinator is gone, a worker
leaves by itself, see :mod:`.orphaned`. Torch's own launcher is for programs that own their process: it takes over the
signals of the process that it is used in.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import SPError
from .console import Console
from .devices import WorkerDevice, visible_devices_environment
from .owner_lock import OwnerLock, OwnerWatch

log = logging.getLogger(__name__)

_PREFIX = "comfyui-sp-"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: a stack trace is written in this time
TRACE_S = 0.5
#: a process that was killed is gone in this time, unless the system holds it
KILL_S = 5.0
#: a directory gets its lock in this time
LOCK_S = 60.0
#: less free disk than this for logs and rendezvous files, and starting makes no sense
ROOM_BYTES = 4 << 20


@dataclass(frozen=True)
class ServiceSpec:
    """What the workers run: ``module:Class`` and its options (JSON), and ``module:function`` to call before torch is imported."""

    target: str
    options: dict[str, Any] = field(default_factory=dict)
    before_torch: str | None = None


class Workers:
    """The worker processes of one pool."""

    def __init__(self, devices: Sequence[WorkerDevice], service: ServiceSpec) -> None:
        self.devices = tuple(devices)
        remove_stale_directories()
        self.directory, self._lock = _private_directory()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._console: Console | None = None
        self._spec = service

    def start(self, *, shared_state: str, requests: str, replies: list[str], start_timeout_s: float) -> None:
        """Start one process a device.

        Args:
            shared_state, requests, replies: paths of the buffers that the pool shares.
            start_timeout_s: how long a worker waits for the others when it joins the control group.

        Raises:
            SPError: the directory cannot be written, or the system starts no process. :meth:`stop` ends those that started.
        """
        config = {
            "service": self._spec.target,
            "service_options": self._spec.options,
            "before_torch": self._spec.before_torch,
            "devices": [[device.kind, device.index] for device in self.devices],
            "directory": str(self.directory),
            "shared_state": shared_state,
            "requests": requests,
            "replies": replies,
            "parent": os.getpid(),
            "log_level": settings.log_level(),
            "start_timeout_s": start_timeout_s,
        }
        config_path = self.directory / "config.json"
        with _readable(self.directory):
            config_path.write_text(json.dumps(config))
        ranks = range(len(self.devices))
        for rank in ranks:
            self._processes[rank] = self._start_rank(rank, config_path)
        self._console = Console({rank: self._log_files(rank) for rank in ranks})

    def _start_rank(self, rank: int, config: Path) -> subprocess.Popen[bytes]:
        bootstrap = str(Path(__file__).with_name("bootstrap.py"))
        command = [sys.executable, *_interpreter_flags(), "-u", bootstrap, str(config), str(rank)]
        with contextlib.ExitStack() as files:
            with _readable(self.directory):
                out, err = (files.enter_context(path.open("wb")) for path in self._log_files(rank))
            try:
                return subprocess.Popen(
                    command, env={**os.environ, **self._environment(rank)}, stdout=out, stderr=err, start_new_session=True
                )
            except OSError as error:
                raise SPError(f"The worker of rank {rank} cannot be started ({error.strerror or error}). {_way_out(error)}") from error

    def _log_files(self, rank: int) -> tuple[Path, Path]:
        return self.directory / f"rank{rank}.out", self.directory / f"rank{rank}.err"

    def _environment(self, rank: int) -> dict[str, str]:
        device = self.devices[rank]
        environment = {
            # one machine: sockets of the data plane stay on the loopback interface too
            "GLOO_SOCKET_IFNAME": _loopback_interface(),
            "NCCL_SOCKET_IFNAME": _loopback_interface(),
            "TP_SOCKET_IFNAME": _loopback_interface(),
            "PYTHONUNBUFFERED": "1",
            **visible_devices_environment(device),
        }
        # Workers of other devices compute on the CPU too: a LoRA is merged there when the weights are not on the device.
        threads = str(max(1, (os.cpu_count() or 1) // len(self.devices)))
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        kept = {} if device.kind == "cpu" else os.environ  # what the user has set for ComfyUI holds beside a GPU
        return environment | {name: kept.get(name, threads) for name in names}

    def last_words(self, rank: int, lines: int = 1) -> str:
        """The end of what the rank wrote to its error stream."""
        with contextlib.suppress(OSError):
            written = _COLOURS.sub("", self._log_files(rank)[1].read_text(errors="replace")).strip().splitlines()
            return "\n".join(written[-lines:])
        return ""

    def keep_log(self, rank: int) -> str:
        """Copy the rank's log out of the private directory, which goes away with the pool; returns where it is now."""
        kept = Path(tempfile.gettempdir()) / f"comfyui-sp-rank{rank}.log"
        try:
            text = self._log_files(rank)[1].read_text(errors="replace")
            descriptor = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
        except OSError:
            return "ComfyUI's console"
        return str(kept)

    def bring_console(self) -> None:
        """Bring to this process's console what the ranks have written up to now."""
        if self._console is not None:
            self._console.catch_up()

    def ask_for_traces(self, ranks: Sequence[int]) -> None:
        """Have ranks write to their logs where every thread is; for those that answer no more."""
        if not hasattr(signal, "SIGUSR1"):
            return
        pids = self.pids()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(pids[rank], signal.SIGUSR1)
        time.sleep(TRACE_S)

    def pids(self) -> dict[int, int]:
        """Process number of every rank."""
        return {rank: process.pid for rank, process in self._processes.copy().items()}

    def exit_codes(self) -> dict[int, int]:
        """Exit code of every rank that has ended; that of a signal is negative."""
        return {rank: code for rank, process in self._processes.copy().items() if (code := process.poll()) is not None}

    def stop(self, grace_s: float) -> None:
        """Wait ``grace_s`` for the workers to leave by themselves, then kill what is left of them."""
        self._wait(grace_s)
        self.kill()
        self._wait(KILL_S)
        self._processes = {}
        if self._console is not None:
            self._console.close()
            self._console = None

    def _wait(self, seconds: float) -> None:
        """Until every worker has ended, but no longer than this."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """End the workers at once, and what they started."""
        for process in self._processes.copy().values():
            if process.poll() is not None:
                continue  # its number may be somebody else's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def remove_directory(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.release()


def _private_directory() -> tuple[Path, OwnerLock]:
    """A new directory that only this user can enter, and the lock that says whose it is.

    Raises:
        SPError: there is no room for one.
    """
    place = Path(tempfile.gettempdir())
    with _readable(place):
        free = shutil.disk_usage(place).free
        if free < ROOM_BYTES:
            raise OSError(errno.ENOSPC, f"only {free >> 10} KB are free")
        # mkdtemp makes it 0700
        directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        return directory, OwnerLock(directory)


@contextlib.contextmanager
def _readable(place: Path) -> Iterator[None]:
    """Trouble with the disk as a sentence that says where and what to do."""
    try:
        yield
    except OSError as error:
        raise SPError(
            f"The workers cannot be started: {place} cannot be written ({error.strerror or error}). "
            "Free some disk space there, or set TMPDIR to a folder that has some, and queue again"
        ) from error


def _interpreter_flags() -> list[str]:
    """The flags that this process's interpreter was started with (-s, -I, -X ...): they say which packages it finds."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]


def _way_out(error: OSError) -> str:
    """What a person can do about a process that the system did not start."""
    if error.filename == sys.executable:
        return f"Python is not at {sys.executable} any more, or may not be run. Restart ComfyUI and queue again"
    return "Close other programs, or raise this user's limit of processes and memory, and queue again"


def _loopback_interface() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def remove_stale_directories() -> None:
    """Remove directories of pools whose process is gone: it was killed, or replaced by another program."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(ValueError, OSError):
            if path.stat().st_uid == os.getuid() and _is_stale(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_stale(directory: Path) -> bool:
    """Nobody holds its lock; where there is none (the file system has no locks), the process that its name tells is gone.

    Raises:
        ValueError: it is no directory of a pool.
        OSError: it is gone.
    """
    pid = int(directory.name.removeprefix(_PREFIX).split("-")[0])
    watch = OwnerWatch(directory)
    there = watch.owner_is_there()
    watch.close()
    if there is not None:
        return not there
    return time.time() - directory.stat().st_mtime > LOCK_S and not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
