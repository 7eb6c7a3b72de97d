"""Starts the worker processes and a private directory for them; ends both.

Processes and log files are torch's own (``torch.distributed.elastic.multiprocessing``). A worker leaves when the process that
started it is gone, see :mod:`.worker`.
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
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes

from ..errors import SPError
from .console import Console
from .devices import WorkerDevice, visible_devices_environment

log = logging.getLogger(__name__)

_PREFIX = "comfyui-sp-"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: a stack trace is written in this time
TRACE_S = 0.5
#: less free disk than this for logs and rendezvous files, and starting makes no sense
ROOM_BYTES = 4 << 20


@dataclass(frozen=True)
class ServiceSpec:
    """What the workers run: ``module:Class`` and its options (JSON), and a function to call before torch is imported."""

    target: str
    options: dict[str, Any] = field(default_factory=dict)
    prelude: str | None = None


class Workers:
    """The worker processes of one pool."""

    def __init__(self, devices: Sequence[WorkerDevice], service: ServiceSpec) -> None:
        self.devices = tuple(devices)
        remove_stale_directories()
        self.directory = _private_directory()
        self._context: PContext | None = None
        self._console: Console | None = None
        self._spec = service

    def start(self, *, shared_state: str, requests: str, replies: list[str]) -> None:
        """Start one process a device; the arguments are paths of shared arenas."""
        config = {
            "service": self._spec.target,
            "service_options": self._spec.options,
            "prelude": self._spec.prelude,
            "devices": [[device.kind, device.index] for device in self.devices],
            "directory": str(self.directory),
            "shared_state": shared_state,
            "requests": requests,
            "replies": replies,
            "parent": os.getpid(),
            "log_level": os.environ.get("SP_LOG_LEVEL", "INFO"),
        }
        config_path = self.directory / "config.json"
        with _readable(self.directory):
            config_path.write_text(json.dumps(config))
        bootstrap = Path(__file__).with_name("bootstrap.py")
        ranks = range(len(self.devices))
        with _readable(self.directory):
            self._context = _in_a_thread(
                start_processes,
                name="sp",
                entrypoint=sys.executable,
                args={rank: ("-u", str(bootstrap), str(config_path), str(rank)) for rank in ranks},
                envs={rank: self._environment(rank) for rank in ranks},
                logs_specs=DefaultLogsSpecs(log_dir=str(self.directory / "logs"), redirects=Std.ALL),
            )
        self._console = Console({rank: [self._context.stdouts[rank], self._context.stderrs[rank]] for rank in ranks})

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
        if device.kind == "cpu":
            threads = max(1, (os.cpu_count() or 1) // len(self.devices))
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        return environment

    def log_file(self, rank: int) -> str:
        if self._context is None:
            return str(self.directory / "logs")
        return self._context.stderrs[rank]

    def last_words(self, rank: int, lines: int = 1) -> str:
        """The end of what the rank wrote to its error stream."""
        with contextlib.suppress(OSError):
            written = _COLOURS.sub("", Path(self.log_file(rank)).read_text(errors="replace")).strip().splitlines()
            return "\n".join(written[-lines:])
        return ""

    def keep_log(self, rank: int) -> str:
        """Copy the rank's log out of the private directory, which goes away with the pool; returns where it is now."""
        kept = Path(tempfile.gettempdir()) / f"comfyui-sp-rank{rank}.log"
        try:
            text = Path(self.log_file(rank)).read_text(errors="replace")
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
        context = self._context
        return dict(context.pids()) if context is not None else {}

    def exit_codes(self) -> dict[int, int]:
        """Exit code of every rank that has ended."""
        context = self._context
        if context is None:
            return {}
        handlers = context.subprocess_handlers  # type: ignore[attr-defined]
        return {rank: code for rank, handler in handlers.items() if (code := handler.proc.poll()) is not None}

    def stop(self, grace_s: float) -> None:
        """Wait ``grace_s`` for the workers to leave by themselves, then kill what is left of them."""
        if self._context is not None:
            deadline = time.monotonic() + grace_s
            while len(self.exit_codes()) < len(self.devices) and time.monotonic() < deadline:
                time.sleep(0.02)
            self.kill()
            with _quiet():
                self._context.close(death_sig=signal.SIGKILL, timeout=5)
            self._context = None
        if self._console is not None:
            self._console.close()
            self._console = None

    def kill(self) -> None:
        """End the workers at once, and what they started."""
        ended = self.exit_codes()
        for rank, pid in self.pids().items():
            if rank in ended:
                continue  # its number may be somebody else's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def remove_directory(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def _private_directory() -> Path:
    """A new directory that only this user can enter.

    Raises:
        SPError: there is no room for one.
    """
    place = Path(tempfile.gettempdir())
    with _readable(place):
        free = shutil.disk_usage(place).free
        if free < ROOM_BYTES:
            raise OSError(errno.ENOSPC, f"only {free >> 10} KB are free")
        # mkdtemp makes it 0700
        return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of torch's launcher: what they warn of is what is wanted here."""

    def drop(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    torchs = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    torchs.addFilter(drop)
    try:
        yield
    finally:
        torchs.removeFilter(drop)


def _in_a_thread(function: Callable[..., PContext], **kwargs: Any) -> PContext:
    """Start processes from a thread of their own: in the main thread torch would take over this process's signals."""
    started: list[PContext] = []
    failed: list[BaseException] = []

    def target() -> None:
        try:
            with _quiet():
                started.append(function(**kwargs))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=target, name="sp-launch")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return started[0]


def _loopback_interface() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def remove_stale_directories() -> None:
    """Remove directories of pools whose process is gone (it was killed)."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(ValueError, OSError):
            if path.stat().st_uid == os.getuid() and not _alive(int(path.name.removeprefix(_PREFIX).split("-")[0])):
                shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
