"""The life of one request: from the moment every rank was asked until every rank has answered, or waiting makes no sense."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import settings
from . import wire
from .control import Frame
from .errors import Cancelled, WorkerFailed, WorkerTimeout
from .launcher import Workers
from .protocol import ReplyStatus
from .shared_buffer import SharedBuffer
from .shared_state import Phase, SharedState

#: After one rank failed, the others have this long to answer. Then they are taken to wait for it in a collective.
FAILURE_GRACE_S = 3.0
#: After a cancel, the caller waits this long for the ranks to stop. Then it returns, and they stop at their next block.
CANCEL_GRACE_S = 0.6


class Request:
    """Collects the answers of all ranks and watches over the ranks that have not answered."""

    def __init__(self, number: int, doing: str, workers: Workers, shared_state: SharedState) -> None:
        self.number, self.doing = number, doing
        self._workers, self._shared_state = workers, shared_state
        self.replies: dict[int, Frame] = {}
        self._start_clocks()

    def _start_clocks(self) -> None:
        now = time.monotonic()
        #: when a rank last got somewhere
        self._moved = now
        self._ticks = self._shared_state.ticks()
        #: when the others have had long enough to answer after a failure
        self._deadline = now + FAILURE_GRACE_S if self.failed else None
        #: when the ranks were asked to stop
        self._cancelled: float | None = None

    @property
    def late(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in range(len(self._shared_state.ranks)) if rank not in self.replies]

    @property
    def failed(self) -> list[int]:
        """Ranks that answered with an error."""
        return [rank for rank, frame in sorted(self.replies.items()) if frame.op == ReplyStatus.FAILED]

    def collect(self, incoming: Callable[[], Iterable[tuple[int, Frame]]], cancels: Callable[[], bool] | None) -> None:
        """Wait for the answers of all ranks, or after a failure for a moment. May be called again after a cancel.

        Args:
            incoming: (rank, frame) of what arrived; waits a moment for the first.
            cancels: asked again and again whether the user cancels.

        Raises:
            Cancelled: the ranks stopped, or, where some are :attr:`late`, they will at their next block.
            WorkerDied: from ``incoming``.
            WorkerTimeout: a rank stands still.
        """
        self._start_clocks()
        while self.late:
            # Before the look at what arrived: a rank that ended is told as such, however long this process was held up.
            given_up = self._is_given_up()
            for rank, frame in incoming():
                self._take(rank, frame)
            if cancels is not None and self._cancelled is None and cancels():
                self._shared_state.cancel(self.number)
                self._cancelled = time.monotonic()
            self._look_for_progress()
            if not self.late or given_up:
                break
            self._leave_if_cancelled()
            self._refuse_standstill()
        if not self.failed and any(frame.op == ReplyStatus.CANCELLED for frame in self.replies.values()):
            raise Cancelled

    def _take(self, rank: int, frame: Frame) -> None:
        if frame.request != self.number:
            return
        self.replies[rank] = frame
        self._moved = time.monotonic()
        if frame.op == ReplyStatus.FAILED:
            self._shared_state.abort(self.number)
            self._deadline = self._deadline or self._moved + FAILURE_GRACE_S

    def _look_for_progress(self) -> None:
        if (ticks := self._shared_state.ticks()) != self._ticks:
            self._ticks, self._moved = ticks, time.monotonic()

    def _is_given_up(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _leave_if_cancelled(self) -> None:
        """The user need not wait for the end of a long block, of a loader or of a copy of weights."""
        if self._cancelled is not None and not self.failed and time.monotonic() - self._cancelled > CANCEL_GRACE_S:
            raise Cancelled

    def _refuse_standstill(self) -> None:
        """A rank that stands still is an error, which names the ranks that the others wait for."""
        states = {rank: self._shared_state.ranks[rank] for rank in self.late}
        limit, variable = settings.stall_timeout_s(), settings.STALL_TIMEOUT
        behind: list[int] = []
        # importing ComfyUI and its custom nodes is one long step, compiling a graph another
        for phase, longer, name in (
            (Phase.STARTING, settings.start_timeout_s(), settings.START_TIMEOUT),
            (Phase.COMPILING, settings.compile_timeout_s(), settings.COMPILE_TIMEOUT),
        ):
            if behind := [rank for rank, state in states.items() if state.phase is phase]:
                limit, variable = max(limit, longer), name
                break
        if not behind:
            lowest = min(state.collective_seq for state in states.values())
            behind = [rank for rank, state in states.items() if state.collective_seq == lowest]
        if time.monotonic() - self._moved <= limit:
            return
        self._workers.ask_for_traces(list(states))
        raise WorkerTimeout(behind, limit, self.doing, variable, self._workers.keep_log(behind[0]))

    def failure(self, buffers: list[SharedBuffer]) -> WorkerFailed | None:
        """The failure that caused the others, which merely say that another rank failed; None where no rank failed.

        Args:
            buffers: the replies of each rank.
        """
        if not self.failed:
            return None
        told = {rank: read_reply(buffers[rank], self.replies[rank], torch.device("cpu")) for rank in self.failed}
        first = next((rank for rank, body in told.items() if body["kind"] != "PeerFailed"), min(told))
        return WorkerFailed(first, told[first]["message"], told[first]["kind"], any(body["fatal"] for body in told.values()))


def read_reply(buffer: SharedBuffer, frame: Frame, device: torch.device, views: bool = False) -> Any:
    """The body that a rank's frame announces, with its tensors on ``device``. ``views``: as in :func:`.wire.unpack`."""
    return wire.unpack(buffer.buffer(frame.total_bytes), frame.header_bytes, device, views=views)
