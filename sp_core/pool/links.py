"""The coordinator's links to its workers: joins them in the control group, hears from them, notices who has ended."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from .control import ControlGroup, Frame
from .errors import WorkerDied
from .launcher import Workers
from .protocol import HANDSHAKE_TIMEOUT_S
from .shared_state import SharedState

log = logging.getLogger(__name__)

#: how often is looked whether all workers have arrived
ARRIVAL_POLL_S = 0.05
#: how long is waited for a frame before the callers' watches are called
FRAME_POLL_S = 0.05
#: a process ends a moment after its socket: its exit code shows in this time
EXIT_CODE_S = 1.0
#: a listener ends in this time when the workers have ended
LISTENERS_END_S = 2.0


class Links:
    """One listening thread a rank; what they hear is read by :meth:`incoming`."""

    def __init__(self, workers: Workers, shared_state: SharedState, lost: Callable[[int], None]) -> None:
        """``lost`` is called in a thread of its own with the rank of a worker whose connection broke."""
        self._workers, self._shared_state, self._lost = workers, shared_state, lost
        self._world_size = len(workers.devices)
        self._control: ControlGroup | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._heard: queue.SimpleQueue[tuple[int, Frame | None]] = queue.SimpleQueue()

    def connect(self) -> None:
        """Join the workers as soon as all have arrived, in a thread; each says READY then."""
        self._start("sp-join", self._connect)

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _connect(self) -> None:
        # A handshake cannot be broken off, so it begins only when no worker is missing.
        while self._shared_state.arrived() < self._world_size:
            if self._closed:
                return
            time.sleep(ARRIVAL_POLL_S)
        try:
            self._control = ControlGroup(self._workers.directory, 0, self._world_size + 1, HANDSHAKE_TIMEOUT_S)
        except RuntimeError as error:
            log.debug("joining the control group failed: %s", error)
            return  # whoever waits for READY notices the dead worker or the time-out
        for rank in range(self._world_size):
            self._start(f"sp-listen-{rank}", self._listen, self._control, rank)

    def _listen(self, control: ControlGroup, rank: int) -> None:
        while True:
            try:
                frame = control.receive(rank + 1)
            except RuntimeError:
                self._heard.put((rank, None))
                self._lost(rank)
                return
            self._heard.put((rank, frame))

    def send(self, frame: Frame) -> None:
        """Send a frame to every rank.

        Raises:
            WorkerDied: a rank cannot be reached.
        """
        assert self._control is not None
        if gone := self._control.send_to_all(frame):
            raise self.died(min(gone) - 1)

    def try_to_send(self, frame: Frame) -> bool:
        """Send a frame to every rank that can be reached; false where some cannot."""
        return self._control is not None and not self._control.send_to_all(frame)

    def incoming(self) -> Iterator[tuple[int, Frame]]:
        """(rank, frame) of what arrived; waits a moment for the first.

        Raises:
            WorkerDied: a worker process has ended.
        """
        dead = self._workers.exit_codes()
        try:
            rank, frame = self._heard.get(timeout=0 if dead else FRAME_POLL_S)
        except queue.Empty:
            if dead:
                raise self.died(min(dead)) from None
            return
        while True:
            if frame is None:
                raise self.died(rank)
            yield rank, frame
            try:
                rank, frame = self._heard.get_nowait()
            except queue.Empty:
                return

    def died(self, rank: int) -> WorkerDied:
        """The error for a rank whose connection broke or whose process ended; it names the rank that ended first."""
        deadline = time.monotonic() + EXIT_CODE_S
        while not (codes := self._workers.exit_codes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if codes and rank not in codes:
            rank = min(codes)  # the worker that ended took the others' connections with it
        code = codes.get(rank)
        how = "it closed its connection" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        if words := self._workers.last_words(rank):
            how += f"; last words: {words[-200:]}"
        return WorkerDied(rank, how, self._workers.keep_log(rank))

    def close(self) -> None:
        """Hear no more, and let go of the pool: with a reference back to it, its memory would stay until Python looks for circles.

        Call this when the workers have ended. A listener that comes back from torch while Python ends would abort the program.
        """
        self._closed, self._control, self._lost = True, None, _nobody_to_tell
        deadline = time.monotonic() + LISTENERS_END_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()


def _nobody_to_tell(rank: int) -> None:
    """The pool that wanted to hear of a lost rank has ended."""
