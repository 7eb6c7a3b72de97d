"""The pool as the coordinator (ComfyUI's process) sees it: start the workers, call them, notice what goes wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .. import settings
from ..errors import SPError
from . import wire
from .control import Frame
from .devices import WorkerDevice
from .errors import Cancelled, WorkerDied, WorkerFailed, WorkerTimeout
from .launcher import ServiceSpec, Workers
from .links import Links
from .protocol import Op
from .request import Request, read_reply
from .shared_buffer import SharedBuffer
from .shared_state import SharedState
from .tensor_cache import TensorCache

log = logging.getLogger(__name__)

#: at the end, a call that another thread waits for has this long to end by itself
SHUTDOWN_GRACE_S = 0.5
#: how often is looked whether the ranks have answered a cancelled request that a call waits for
SETTLE_POLL_S = 0.2

#: called while the pool waits; true asks for a cancel
CancelWatch = Callable[["Pool"], bool]


@dataclass
class CallStats:
    """What one call cost the coordinator: bytes written for the workers, and bytes that they held already."""

    bytes_sent: int = 0
    bytes_reused: int = 0


class Pool:
    """N worker processes and the control group that joins them to this one.

    One caller at a time. Every rank answers a call; rank 0's answer is the result. A pool
    that failed is over (:attr:`usable` is false): make another.
    """

    def __init__(self, devices: Sequence[WorkerDevice], service: ServiceSpec) -> None:
        self.devices, self.service = tuple(devices), service
        self.world_size = len(self.devices)
        self.last_call = CallStats()
        self.usable = False
        #: the workers have ended, or could not be started
        self.over = False
        #: a request failed on some rank, so the ranks may have counted collectives differently: they must make their groups anew
        self.out_of_step = False
        #: ranks that have not joined yet
        self.waiting = set(range(self.world_size))
        self._launched = 0.0
        self._start_timeout_s = settings.start_timeout_s()
        self._request = 0
        #: a cancelled request that some ranks have not answered yet
        self._pending: Request | None = None
        #: a request whose answers nobody waits for: the next call takes them first
        self._unheard: Request | None = None
        #: calls that wait for the answers to a cancelled request
        self._afterwards: list[tuple[str, Any, str]] = []
        self._lock = threading.RLock()
        self._sent = TensorCache()
        self.workers = Workers(self.devices, service)
        create = partial(SharedBuffer.create, self.workers.directory)
        self._requests = create("requests", 1 << 20)
        self._replies = [create(f"reply-{rank}", 1 << 16) for rank in range(self.world_size)]
        self._state_buffer = create("shared_state", SharedState.nbytes(self.world_size))
        self.shared_state = SharedState(self._state_buffer, self.world_size)
        self._links = Links(self.workers, self.shared_state, self._lost)

    # -- life --------------------------------------------------------------------

    def start(self, watch: CancelWatch | None = None) -> None:
        """Start the workers and wait until each has joined: :meth:`launch` and :meth:`join`."""
        self.launch()
        self.join(watch)

    def launch(self) -> None:
        """Start the worker processes.

        Raises:
            SPError: they cannot be started; nothing is left of them.
        """
        self._launched = time.monotonic()
        weakref.finalize(self, _end_with_program, weakref.ref(self), os.getpid())
        log.info("starting %d workers: %s", self.world_size, ", ".join(map(str, self.devices)))
        try:
            self.workers.start(
                shared_state=self._state_buffer.path,
                requests=self._requests.path,
                replies=[buffer.path for buffer in self._replies],
                start_timeout_s=self._start_timeout_s,
            )
        except BaseException:
            self.shutdown(grace_s=0)
            raise
        self._links.connect()

    def join(self, watch: CancelWatch | None = None) -> None:
        """Wait until every worker has joined. What ``watch`` raises leaves them starting: join again.

        Raises:
            WorkerDied: a worker ended before it joined.
            WorkerTimeout: a worker did not join in time.
        """
        try:
            while self.waiting:
                for rank, _ in self._links.incoming():
                    self.waiting.discard(rank)
                if self.waiting and time.monotonic() - self._launched > self._start_timeout_s:
                    raise WorkerTimeout(sorted(self.waiting), self._start_timeout_s, "starting", settings.START_TIMEOUT)
                if watch is not None:
                    watch(self)
        except (WorkerDied, WorkerTimeout):
            self.shutdown(grace_s=0)
            raise
        self.usable = True
        log.info("%d workers joined after %.1f s", self.world_size, time.monotonic() - self._launched)

    def _lost(self, rank: int) -> None:
        """End the pool if no caller is there to notice: else the other ranks would keep their memory between two calls."""
        if self.usable and self._lock.acquire(blocking=False):
            try:
                if self.usable:
                    log.warning("%s", self._links.died(rank))
                    self.shutdown(grace_s=0)
            finally:
                self._lock.release()

    def shutdown(self, grace_s: float = 2.0) -> None:
        """End the workers and leave nothing behind. Safe to call twice, and while another thread is in a call."""
        if not self._lock.acquire(timeout=SHUTDOWN_GRACE_S):
            # The thread in the call is told that the workers died, and lets go of the lock.
            self.workers.kill()
            self._lock.acquire(timeout=5)
        try:
            if not self.usable or self._pending is not None:
                grace_s = 0
            if grace_s and not self._links.try_to_send(Frame(Op.SHUTDOWN, 0)):
                grace_s = min(grace_s, 0.1)
            self.usable, self.over = False, True
            self.workers.stop(grace_s)
            self._sent = TensorCache()
            self._pending = self._unheard = None
            self._links.close()
            self._afterwards.clear()
            self.shared_state.keep_a_copy()
            for buffer in (self._requests, self._state_buffer, *self._replies):
                buffer.close()
            self.workers.remove_directory()
        finally:
            with contextlib.suppress(RuntimeError):  # where the other thread never let go, this one does not hold the lock
                self._lock.release()

    # -- is it in use ------------------------------------------------------------

    @property
    def requests(self) -> int:
        """How many requests the workers have been sent."""
        return self._request

    def is_busy(self) -> bool:
        """A rank works on a request, also on one that was cancelled. Never waits."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            return self._pending is not None
        finally:
            self._lock.release()

    # -- calls -------------------------------------------------------------------

    def call(
        self,
        operation: str,
        body: Any,
        *,
        device: torch.device | None = None,
        doing: str = "",
        watch: CancelWatch | None = None,
        volatile: tuple[str, ...] = (),
        each: Callable[[int, Any], None] | None = None,
    ) -> Any:
        """Ask every worker and return rank 0's value, tensors on ``device`` (default CPU).

        Args:
            operation: passed to the service.
            body: a tree of plain values and tensors, or a function that makes it when the ranks are ready.
            device: where the tensors of the answer are wanted.
            doing: what a time-out message says the ranks were doing.
            volatile: places in the body whose tensors are new each time, so not worth remembering.
            watch: called about twenty times a second; true asks for a cancel.
            each: given (rank, its value) one after the other, where the service answers from each rank; the call returns None then.
                Tensors of a value are views of memory that the next call overwrites.

        Raises:
            Cancelled: after a cancel; the workers are fine, and stop at their next block if they have not yet.
            WorkerFailed: a rank raised; if all ranks answered, the pool stays usable.
            WorkerDied, WorkerTimeout: the pool is over.
            WireError: the body cannot be sent; the workers saw nothing of it.
            SPError: the pool is over, or not ready yet.
        """
        with self._lock:
            if not self.usable:
                raise SPError("the workers are not running")
            self.settle(watch)
            request = self._send(operation, body, doing, volatile)
            self._collect(request, watch)
            if each is None:
                return read_reply(self._replies[0], request.replies[0], device or torch.device("cpu"))
            for rank, buffer in enumerate(self._replies):
                each(rank, read_reply(buffer, request.replies[rank], torch.device("cpu"), views=True))
            return None

    def afterwards(self, operation: str, body: Any, doing: str, wait: bool = True) -> None:
        """A call whose answer nobody needs: now, or as soon as every rank has answered a request that was cancelled.

        If the workers end meanwhile this raises nothing: the next call does.

        Args:
            wait: false returns as soon as every rank was asked.
        """
        with self._lock:
            if self._pending is None:
                (self._call_quietly if wait else self._send_quietly)(operation, body, doing)
                return
            self._afterwards.append((operation, body, doing))
            if len(self._afterwards) == 1:
                threading.Thread(target=self._settle_later, name="sp-settle", daemon=True).start()

    def _send_quietly(self, operation: str, body: Any, doing: str) -> None:
        try:
            self.settle()
            self._unheard = self._send(operation, body, doing)
        except SPError as error:
            log.warning("%s: %s", doing, error)

    def _call_quietly(self, operation: str, body: Any, doing: str) -> SPError | None:
        try:
            self.call(operation, body, doing=doing)
        except SPError as error:
            log.warning("%s: %s", doing, error)
            return error
        return None

    def _settle_later(self) -> None:
        """Settle without keeping a caller from doing so itself."""
        while True:
            with self._lock:
                if not self.usable or self._pending is None:
                    return
                try:
                    self.settle(lambda _: True)
                except Cancelled:
                    pass  # not yet
                except SPError as error:
                    log.warning("%s", error)
            time.sleep(SETTLE_POLL_S)

    def settle(self, watch: CancelWatch | None = None) -> None:
        """Wait until every rank has answered a request that was cancelled, or that nobody waited for. Returns at once without one.

        Raises:
            Cancelled: ``watch`` says that the user does not want to wait.
            WorkerDied, WorkerTimeout: the pool is over.
            SPError: it was over before.
        """
        with self._lock:
            if self.over:
                raise SPError("the workers are not running")
            if dead := self.workers.exit_codes():
                error = self._links.died(min(dead))
                self.shutdown(grace_s=0)
                raise error
            if self._pending is not None:
                self._pending.doing = "stopping after a cancel"
            request, self._pending, self._unheard = self._pending or self._unheard, None, None
            if request is None:
                return
            try:
                self._collect(request, watch)
            except WorkerFailed as error:
                if not self.usable:
                    raise
                log.warning("%s: %s", request.doing, error)
            except Cancelled:
                if self._pending is not None:
                    raise
            waiting, self._afterwards = self._afterwards, []
            for waited in waiting:
                failed = self._call_quietly(*waited)
                if failed is not None and not self.usable:
                    raise failed

    def forget_sent(self) -> None:
        """A sampling run is over: its conditioning need not be kept."""
        self._sent.forget_all()

    def _send(self, operation: str, body: Any, doing: str, volatile: tuple[str, ...] = ()) -> Request:
        """Ask every rank. Arguments as of :meth:`call`."""
        self._request += 1
        frame = self._put(self._request, [operation, body() if callable(body) else body], volatile)
        request = Request(self._request, doing or operation, self.workers, self.shared_state)
        try:
            self._links.send(frame)
        except WorkerDied:
            self.shutdown(grace_s=0)
            raise
        return request

    def _put(self, request: int, message: list[Any], volatile: tuple[str, ...]) -> Frame:
        encoded = wire.encode(message)
        entries = [
            {} if path.removeprefix("1.").startswith(volatile) else self._sent.entry(path, tensor)
            for path, tensor in zip(encoded.paths, encoded.tensors, strict=True)
        ]
        forget = wire.encode(self._sent.take_forgotten()).tree
        encoded.tree["list"].append(forget)
        fresh = [tensor for entry, tensor in zip(entries, encoded.tensors, strict=True) if "cached" not in entry]
        header, offsets, total = wire.pack(encoded.tree, entries, fresh)
        self._requests.reserve(total)
        wire.write(self._requests.buffer(total), header, offsets, fresh)
        self.last_call = CallStats(total, sum(map(wire.nbytes, encoded.tensors)) - sum(map(wire.nbytes, fresh)))
        return Frame(Op.REQUEST, request, len(header), total)

    def _collect(self, request: Request, watch: CancelWatch | None) -> None:
        """Wait until all ranks have answered the request."""
        try:
            request.collect(self._links.incoming, None if watch is None else partial(watch, self))
        except (WorkerDied, WorkerTimeout):
            self.shutdown(grace_s=0)
            raise
        except Cancelled:
            self._pending = request if request.late else None
            raise
        error = request.failure(self._replies)
        if error is None:
            return
        self.workers.bring_console()
        self.out_of_step = True
        # It is not known whether a rank that failed keeps what it was sent.
        self._sent.forget_all()
        if request.late or error.fatal:
            # A late rank waits for the failed one inside a collective, or a device is lost.
            log.warning("the pool is stopped because of rank %d; its log is kept in %s", error.rank, self.workers.keep_log(error.rank))
            self.shutdown(grace_s=0)
        raise error


def _end_with_program(pool: weakref.ref[Pool], process: int) -> None:
    """End a pool that its user left open. Otherwise a listener can come back from torch while Python ends, which aborts the program.

    Args:
        process: the one that started the pool. What it forks has a copy, and no right to end it.
    """
    left = pool()
    if left is not None and not left.over and os.getpid() == process:
        left.shutdown()
