"""Workers that nobody has used for some time end, and their devices are free; the next prompt starts them again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...pool.coordinator import Pool

log = logging.getLogger(__name__)

#: how often is looked whether a pool is idle, unless the idle time is shorter
IDLE_POLL_S = 2.0


class IdleClock:
    """How long a pool has not been used. A request that was answered between two looks counts as a use.

    Args:
        limit_s: how long a pool may be idle.
        requests: how many requests the pool has been sent up to ``now``.
    """

    def __init__(self, limit_s: float, requests: int, now: float) -> None:
        self._limit_s = limit_s
        self._requests, self._used = requests, now

    def is_over(self, in_use: bool, requests: int, now: float) -> bool:
        """Whether the pool has been idle for as long as it may."""
        if in_use or requests != self._requests:
            self._requests, self._used = requests, now
        return now - self._used >= self._limit_s


def end_when_idle(pool: Pool, limit_s: float, in_use: Callable[[], bool], end: Callable[[], bool]) -> None:
    """Watch ``pool`` in a thread of its own until it is over.

    Args:
        limit_s: how long it may be idle.
        in_use: a prompt that may need the pool runs.
        end: ends the pool, or gives false where it was taken in use meanwhile.
    """
    clock = IdleClock(limit_s, pool.requests, time.monotonic())

    def watch() -> None:
        while not pool.over:
            time.sleep(min(IDLE_POLL_S, limit_s / 4))
            if clock.is_over(in_use() or pool.is_busy(), pool.requests, time.monotonic()) and end():
                log.info("the workers were idle for %.0f s and have ended: %s", limit_s, ", ".join(map(str, pool.devices)))

    threading.Thread(target=watch, name="sp-idle", daemon=True).start()
