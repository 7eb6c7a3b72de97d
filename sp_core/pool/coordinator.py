"""The pool as the UI process sees it: start the workers, call them, notice what goes wrong."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SPError
from . import wire
from .control import ControlGroup, Frame
from .devices import WorkerDevice
from .errors import Cancelled, WorkerDied, WorkerFailed, WorkerTimeout
from .launcher import ServiceSpec, Workers
from .protocol import CONNECT_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, Op, ReplyStatus, timeout_s
from .shared_buffer import SharedBuffer
from .shared_state import Phase, SharedState
from .tensor_cache import SentTensors

log = logging.getLogger(__name__)

#: after one rank failed, the others have this long to answer before the pool is given up
FAILURE_GRACE_S = 3.0
#: after a cancel, the caller waits this long for the ranks to stop; then they stop without it, see :meth:`Pool.settle`
CANCEL_GRACE_S = 0.6
#: at the end, a call that another thread waits for has this long to end by itself
SHUTDOWN_GRACE_S = 0.5
POLL_S = 0.05

Watch = Callable[["Pool"], bool]


@dataclass
class CallStats:
    """What one call cost on this side."""

    bytes_sent: int = 0
    bytes_reused: int = 0
    seconds: float = 0.0


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
        #: ended, or never to be usable
        self.over = False
        #: a request failed on some rank: what the ranks share may be out of step until they make it anew
        self.out_of_step = False
        #: ranks that have not joined yet
        self.waiting = set(range(self.world_size))
        self._launched = 0.0
        self._request = 0
        #: a cancelled request that some ranks have not answered yet, and the answers so far
        self._pending: dict[int, Frame] | None = None
        #: calls that wait for that
        self._afterwards: list[tuple[str, Any, str]] = []
        self._lock = threading.RLock()
        self._events: queue.SimpleQueue[tuple[int, Frame | None]] = queue.SimpleQueue()
        self._sent = SentTensors()
        self._control: ControlGroup | None = None
        self.workers = Workers(self.devices, service)
        make = lambda name, size: SharedBuffer.create(self.workers.directory, name, size)  # noqa: E731
        self._requests = make("requests", 1 << 20)
        self._replies = [make(f"reply-{rank}", 1 << 16) for rank in range(self.world_size)]
        self._board_arena = make("shared_state", SharedState.nbytes(self.world_size))
        self.shared_state = SharedState(self._board_arena, self.world_size)

    # -- life --------------------------------------------------------------------

    def start(self, watch: Watch | None = None) -> None:
        """Start the workers and wait until each has joined: :meth:`launch` and :meth:`join`."""
        self.launch()
        self.join(watch)

    def launch(self) -> None:
        """Start the worker processes.

        Raises:
            SPError: they cannot be started; nothing is left of them.
        """
        self._launched = time.monotonic()
        log.info("starting %d workers: %s", self.world_size, ", ".join(map(str, self.devices)))
        try:
            self.workers.start(
                shared_state=self._board_arena.path, requests=self._requests.path, replies=[arena.path for arena in self._replies]
            )
        except BaseException:
            self.shutdown(grace_s=0)
            raise
        threading.Thread(target=self._connect, name="sp-join", daemon=True).start()

    def join(self, watch: Watch | None = None) -> None:
        """Wait until every worker has joined. What ``watch`` raises leaves them starting: join again.

        Raises:
            WorkerDied: a worker ended before it joined.
            WorkerTimeout: a worker did not join in time.
        """
        try:
            while self.waiting:
                for rank, _ in self._incoming():
                    self.waiting.discard(rank)
                if self.waiting and time.monotonic() - self._launched > CONNECT_TIMEOUT_S:
                    raise WorkerTimeout(sorted(self.waiting), CONNECT_TIMEOUT_S, "starting")
                if watch is not None:
                    watch(self)
        except (WorkerDied, WorkerTimeout):
            self.shutdown(grace_s=0)
            raise
        self.usable = True
        log.info("%d workers joined after %.1f s", self.world_size, time.monotonic() - self._launched)

    def _connect(self) -> None:
        # a handshake cannot be broken off, so it waits until nobody is missing
        while self.shared_state.arrived() < self.world_size:
            if self.over:
                return
            time.sleep(POLL_S)
        try:
            self._control = ControlGroup(self.workers.directory, 0, self.world_size + 1, HANDSHAKE_TIMEOUT_S)
        except RuntimeError as error:
            log.debug("joining the control group failed: %s", error)
            return  # join() notices the dead worker or the time
        for rank in range(self.world_size):
            threading.Thread(target=self._listen, args=(rank,), name=f"sp-listen-{rank}", daemon=True).start()

    def _listen(self, rank: int) -> None:
        control = self._control
        assert control is not None
        while True:
            try:
                frame = control.receive(rank + 1)
            except RuntimeError:
                self._events.put((rank, None))
                break
            self._events.put((rank, frame))
        del control
        # a caller notices by itself; between calls nobody would, and the other ranks' memory would stay taken
        if self.usable and self._lock.acquire(blocking=False):
            try:
                if self.usable:
                    log.warning("%s", self._died(rank))
                    self.shutdown(grace_s=0)
            finally:
                self._lock.release()

    def shutdown(self, grace_s: float = 2.0) -> None:
        """End the workers and leave nothing behind. Safe to call twice, and while another thread is in a call."""
        if not self._lock.acquire(timeout=SHUTDOWN_GRACE_S):
            # its caller is told that they died, and lets go
            self.workers.kill()
            self._lock.acquire(timeout=5)
        try:
            if self.usable and self._control is not None and grace_s and self._pending is None:
                for rank in range(self.world_size):
                    try:
                        self._control.send(rank + 1, Frame(Op.SHUTDOWN, 0))
                    except RuntimeError:
                        grace_s = min(grace_s, 0.1)
            else:
                grace_s = 0
            self.usable, self.over = False, True
            self.workers.stop(grace_s)
            self._sent = SentTensors()
            self._pending = self._control = None
            self._afterwards.clear()
            for arena in (self._requests, self._board_arena, *self._replies):
                arena.close()
            self.workers.remove_directory()
        finally:
            with contextlib.suppress(RuntimeError):  # not ours if the other thread never let go
                self._lock.release()

    # -- calls -------------------------------------------------------------------

    def call(
        self,
        operation: str,
        body: Any,
        *,
        device: torch.device | None = None,
        doing: str = "",
        watch: Watch | None = None,
        volatile: tuple[str, ...] = (),
    ) -> Any:
        """Ask every worker and return rank 0's value, tensors on ``device`` (default CPU).

        Args:
            operation: passed to the service.
            body: a tree of plain values and tensors, or a function that makes it when the ranks are ready.
            doing: what a time-out message says the ranks were doing.
            volatile: places in the body whose tensors are new each time, so not worth remembering.
            watch: called about twenty times a second; true asks for a cancel.

        Raises:
            Cancelled: after a cancel; the workers are fine, and stop at their next block if they have not yet.
            WorkerFailed: a rank raised; if all ranks answered, the pool stays usable.
            WorkerDied, WorkerTimeout: the pool is over.
            WireError: the body cannot be sent; the workers saw nothing of it.
        """
        with self._lock:
            if not self.usable:
                raise SPError("the workers are not running")
            self.settle(watch)
            started = time.perf_counter()
            self._request += 1
            frame = self._put(self._request, [operation, body() if callable(body) else body], volatile)
            try:
                for rank in range(self.world_size):
                    self._send(rank, frame)
                replies = self._collect(doing or operation, watch)
            except (WorkerDied, WorkerTimeout):
                self.shutdown(grace_s=0)
                raise
            self.last_call.seconds = time.perf_counter() - started
            return self._read(0, replies[0], device or torch.device("cpu"))

    def afterwards(self, operation: str, body: Any, doing: str) -> None:
        """A call whose answer nobody needs: now, or as soon as every rank has answered a request that was cancelled.

        Workers that end meanwhile are no failure of it: the next call says so.
        """
        with self._lock:
            if self._pending is None:
                self._call_quietly(operation, body, doing)
                return
            self._afterwards.append((operation, body, doing))
            if len(self._afterwards) == 1:
                threading.Thread(target=self._settle_later, name="sp-settle", daemon=True).start()

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
            time.sleep(4 * POLL_S)

    def settle(self, watch: Watch | None = None) -> None:
        """Wait until every rank has answered a request that was cancelled. Returns at once when there is none.

        Raises:
            Cancelled: ``watch`` says that the user does not want to wait.
            WorkerDied, WorkerTimeout: the pool is over.
        """
        with self._lock:
            if dead := self.workers.exit_codes():
                error = self._died(min(dead))
                self.shutdown(grace_s=0)
                raise error
            replies, self._pending = self._pending, None
            if replies is None:
                return
            try:
                self._collect("stopping after a cancel", watch, replies)
            except (WorkerDied, WorkerTimeout):
                self.shutdown(grace_s=0)
                raise
            except WorkerFailed as error:
                if not self.usable:
                    raise
                log.warning("%s, after a cancel", error)
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

    def _send(self, rank: int, frame: Frame) -> None:
        assert self._control is not None
        try:
            self._control.send(rank + 1, frame)
        except RuntimeError as error:
            raise self._died(rank) from error

    def _read(self, rank: int, frame: Frame, device: torch.device) -> Any:
        buffer = self._replies[rank].buffer(frame.total_bytes)
        return wire.unpack(buffer, frame.header_bytes, device)

    def _collect(self, doing: str, watch: Watch | None, answered: dict[int, Frame] | None = None) -> dict[int, Frame]:
        """Wait for every rank's answer to the current request; some may have answered it already."""
        replies = dict(answered or {})
        failures = {rank: frame for rank, frame in replies.items() if frame.op == ReplyStatus.FAILED}
        limit = timeout_s()
        ticks, moved = self.shared_state.ticks(), time.monotonic()
        deadline = moved + FAILURE_GRACE_S if failures else None
        cancelled: float | None = None
        while len(replies) < self.world_size:
            for rank, frame in self._incoming():
                if frame.request != self._request:
                    continue
                replies[rank] = frame
                moved = time.monotonic()
                if frame.op == ReplyStatus.FAILED:
                    failures[rank] = frame
                    self.shared_state.abort(self._request)
                    deadline = deadline or moved + FAILURE_GRACE_S
            now = time.monotonic()
            if watch is not None and cancelled is None and watch(self):
                self.shared_state.request_cancel(self._request)
                cancelled = now
            if (current := self.shared_state.ticks()) != ticks:
                ticks, moved = current, now
            late = [rank for rank in range(self.world_size) if rank not in replies]
            if late and deadline is not None and now > deadline:
                break
            if late and cancelled is not None and not failures and now - cancelled > CANCEL_GRACE_S:
                # in a long block, a loader or a copy of weights: the user need not wait for its end
                self._pending = replies
                raise Cancelled
            if late and now - moved > limit:
                if limit < CONNECT_TIMEOUT_S and any(self.shared_state.phase(rank) is Phase.STARTING for rank in late):
                    limit = CONNECT_TIMEOUT_S  # importing the host is one long step
                    continue
                raise self._stands_still(late, limit, doing)
        if failures:
            complete = len(replies) == self.world_size
            error = self._failure(failures)
            self.workers.bring_console()
            self.out_of_step = True
            # whether a rank that failed keeps what it was sent is not known
            self._sent.forget_all()
            if not complete or error.fatal:
                # somebody still waits for the failed rank inside a collective, or its device is lost
                log.warning("the pool is stopped because of rank %d; its log is kept in %s", error.rank, self.workers.keep_log(error.rank))
                self.shutdown(grace_s=0)
            raise error
        if any(frame.op == ReplyStatus.CANCELLED for frame in replies.values()):
            raise Cancelled
        return replies

    def _failure(self, failures: dict[int, Frame]) -> WorkerFailed:
        """The failure that caused the others: one that is not merely 'another rank failed'."""
        told = {rank: self._read(rank, frame, torch.device("cpu")) for rank, frame in sorted(failures.items())}
        first = next((rank for rank, body in told.items() if body["kind"] != "PeerFailed"), min(told))
        return WorkerFailed(first, told[first]["message"], told[first]["kind"], any(body["fatal"] for body in told.values()))

    def _stands_still(self, late: list[int], limit: float, doing: str) -> WorkerTimeout:
        """Names the ranks that the others wait for, and has every late rank write down where it is."""
        entered = [self.shared_state.collective_seq(rank) for rank in range(self.world_size)]
        behind = [rank for rank in late if entered[rank] == min(entered[other] for other in late)]
        self.workers.ask_for_traces(late)
        return WorkerTimeout(behind, limit, doing, self.workers.keep_log(behind[0]))

    def _incoming(self) -> Iterator[tuple[int, Frame]]:
        """Frames that arrived; waits a moment for the first.

        Raises:
            WorkerDied: a worker process has ended.
        """
        dead = self.workers.exit_codes()
        try:
            rank, frame = self._events.get(timeout=0 if dead else POLL_S)
        except queue.Empty:
            if dead:
                raise self._died(min(dead)) from None
            return
        while True:
            if frame is None:
                raise self._died(rank)
            yield rank, frame
            try:
                rank, frame = self._events.get_nowait()
            except queue.Empty:
                return

    def _died(self, rank: int) -> WorkerDied:
        # the process ends a moment after its socket: give its exit code time to show
        deadline = time.monotonic() + 1.0
        while not (codes := self.workers.exit_codes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if codes and rank not in codes:
            rank = min(codes)  # the one that ended took the others' connections with it
        code = codes.get(rank)
        how = "it closed its connection" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        words = self.workers.last_words(rank)
        if words:
            how += f"; last words: {words[-200:]}"
        return WorkerDied(rank, how, self.workers.keep_log(rank))
