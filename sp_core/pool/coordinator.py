"""The pool as the UI process sees it: start the workers, call them, notice what goes wrong."""

from __future__ import annotations

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
from .arena import SharedArena
from .board import Board
from .control import ControlGroup, Frame
from .devices import WorkerDevice
from .errors import Cancelled, WorkerDied, WorkerFailed, WorkerTimeout
from .launcher import ServiceSpec, Workers
from .protocol import CONNECT_TIMEOUT_S, Op, Status, timeout_s
from .sent import SentTensors

log = logging.getLogger(__name__)

#: after one rank failed, the others have this long to answer before the pool is given up
FAILURE_GRACE_S = 3.0
#: after a cancel, the ranks have this long to reach the next block
CANCEL_GRACE_S = 30.0
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
        #: a request failed on some rank: what the ranks share may be out of step until they make it anew
        self.out_of_step = False
        #: ranks that have not joined yet
        self.waiting = set(range(self.world_size))
        self._request = 0
        self._lock = threading.RLock()
        self._events: queue.SimpleQueue[tuple[int, Frame | None]] = queue.SimpleQueue()
        self._sent = SentTensors()
        self._control: ControlGroup | None = None
        self.workers = Workers(self.devices, service)
        make = lambda name, size: SharedArena.create(self.workers.directory, name, size)  # noqa: E731
        self._requests = make("requests", 1 << 20)
        self._replies = [make(f"reply-{rank}", 1 << 16) for rank in range(self.world_size)]
        self._board_arena = make("board", Board.nbytes(self.world_size))
        self.board = Board(self._board_arena, self.world_size)

    # -- life --------------------------------------------------------------------

    def start(self, watch: Watch | None = None) -> None:
        """Start the workers and wait until each has joined.

        Raises:
            WorkerDied: a worker ended before it joined.
            WorkerTimeout: a worker did not join in time.
        """
        started = time.monotonic()
        log.info("starting %d workers: %s", self.world_size, ", ".join(map(str, self.devices)))
        try:
            self.workers.start(board=self._board_arena.path, requests=self._requests.path, replies=[arena.path for arena in self._replies])
            threading.Thread(target=self._join, name="sp-join", daemon=True).start()
            while self.waiting:
                for rank, _ in self._incoming():
                    self.waiting.discard(rank)
                if watch is not None:
                    watch(self)
                if self.waiting and time.monotonic() - started > CONNECT_TIMEOUT_S:
                    raise WorkerTimeout(sorted(self.waiting), CONNECT_TIMEOUT_S, "starting")
        except BaseException:
            self.shutdown(grace_s=0)
            raise
        self.usable = True
        log.info("%d workers joined after %.1f s", self.world_size, time.monotonic() - started)

    def _join(self) -> None:
        try:
            self._control = ControlGroup(self.workers.directory, 0, self.world_size + 1, CONNECT_TIMEOUT_S)
        except RuntimeError as error:
            log.debug("joining the control group failed: %s", error)
            return  # start() notices the dead worker or the time
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
                return
            self._events.put((rank, frame))

    def shutdown(self, grace_s: float = 2.0) -> None:
        """End the workers and leave nothing behind. Safe to call twice."""
        with self._lock:
            if self.usable and self._control is not None and grace_s:
                for rank in range(self.world_size):
                    try:
                        self._control.send(rank + 1, Frame(Op.SHUTDOWN, 0))
                    except RuntimeError:
                        grace_s = min(grace_s, 0.1)
            self.usable = False
            self.workers.stop(grace_s)
            self._sent = SentTensors()
            for arena in (self._requests, self._board_arena, *self._replies):
                arena.close()
            self.workers.remove_directory()

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
            body: a tree of plain values and tensors.
            doing: what a time-out message says the ranks were doing.
            volatile: places in the body whose tensors are new each time, so not worth remembering.
            watch: called about twenty times a second; true asks for a cancel.

        Raises:
            Cancelled: after a cancel; the workers are fine.
            WorkerFailed: a rank raised; if all ranks answered, the pool stays usable.
            WorkerDied, WorkerTimeout: the pool is over.
            WireError: the body cannot be sent; the workers saw nothing of it.
        """
        with self._lock:
            if not self.usable:
                raise SPError("the workers are not running")
            started = time.perf_counter()
            self._request += 1
            frame = self._put(self._request, [operation, body], volatile)
            try:
                for rank in range(self.world_size):
                    self._send(rank, frame)
                replies = self._collect(doing or operation, watch)
            except (WorkerDied, WorkerTimeout):
                self.shutdown(grace_s=0)
                raise
            self.last_call.seconds = time.perf_counter() - started
            return self._read(0, replies[0], device or torch.device("cpu"))

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

    def _collect(self, doing: str, watch: Watch | None) -> dict[int, Frame]:
        """Wait for every rank's answer to the current request."""
        replies: dict[int, Frame] = {}
        failures: dict[int, Frame] = {}
        limit = timeout_s()
        ticks, moved = self.board.ticks(), time.monotonic()
        deadline: float | None = None
        cancelling = False
        while len(replies) < self.world_size:
            for rank, frame in self._incoming():
                if frame.request != self._request:
                    continue
                replies[rank] = frame
                moved = time.monotonic()
                if frame.op == Status.FAILED:
                    failures[rank] = frame
                    self.board.abort(self._request)
                    deadline = deadline or moved + FAILURE_GRACE_S
            now = time.monotonic()
            if watch is not None and not cancelling and watch(self):
                self.board.request_cancel(self._request)
                cancelling, deadline = True, deadline or now + CANCEL_GRACE_S
            if (current := self.board.ticks()) != ticks:
                ticks, moved = current, now
            late = [rank for rank in range(self.world_size) if rank not in replies]
            if late and deadline is not None and now > deadline:
                if failures:
                    break
                raise WorkerTimeout(late, CANCEL_GRACE_S, f"stopping after a cancel ({doing})")
            if late and now - moved > limit:
                raise WorkerTimeout(late, limit, doing)
        if failures:
            complete = len(replies) == self.world_size
            error = self._failure(failures)
            self.out_of_step = True
            if not complete:
                # somebody still waits for the failed rank inside a collective
                log.warning("rank %d failed while others were waiting for it: the pool is stopped", error.rank)
                self.shutdown(grace_s=0)
            raise error
        if any(frame.op == Status.CANCELLED for frame in replies.values()):
            raise Cancelled
        return replies

    def _failure(self, failures: dict[int, Frame]) -> WorkerFailed:
        """The failure that caused the others: one that is not merely 'another rank failed'."""
        told = {rank: self._read(rank, frame, torch.device("cpu")) for rank, frame in sorted(failures.items())}
        first = next((rank for rank, body in told.items() if body["kind"] != "PeerFailed"), min(told))
        return WorkerFailed(first, told[first]["message"], told[first]["kind"])

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
