"""A rank that takes longer than it could, for benchmarks and tests of devices that are not equally fast."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from ..comm import TransportStats
from ..errors import SPError


def factor_of(text: str, rank: int) -> float:
    """How many times as long ``rank`` shall take: "1:2,2:3" says two times for rank 1, three times for rank 2; once where it names none.

    Raises:
        SPError: the text says something else.
    """
    found = 1.0
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, times = part.partition(":")
        try:
            number, factor = int(name), float(times)
        except ValueError:
            raise SPError(f"'{part}' slows no rank down: it is the number of a rank and how many times as long it takes, as 1:2") from None
        if factor < 1:
            raise SPError(f"'{part}' would make rank {number} faster; no rank can take less than once as long")
        if number == rank:
            found = factor
    return found


class Slowdown:
    """Lets a rank wait before each exchange until its work since the last one has taken ``factor`` times as long."""

    def __init__(
        self,
        stats: TransportStats,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
        work_clock: Callable[[], float] | None = None,
    ):
        """
        Args:
            stats: those that all exchanges of this rank count into; time inside an exchange is no work.
            work_clock: seconds that this rank has computed, where ranks share cores and what passes while one waits for a core
                is no work of its own; else all time outside exchanges is work.
        """
        self._stats, self._wait, self._clock, self._work_clock = stats, wait, clock, work_clock
        self._since: float | None = None
        self._exchanged = self._computed = 0.0
        self.factor = 1.0

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward, whose statistics begin anew in it. What is exchanged outside follows no work."""
        self._stats.reset()
        self._begin()
        try:
            yield
            self.before_exchange()
        finally:
            self._since = None

    def entering(self, enter: Callable[[], None]) -> Callable[[], None]:
        """What a transport calls when this rank is about to wait for the others: waits for itself before ``enter``."""

        def wait_and_enter() -> None:
            self.before_exchange()
            enter()

        return wait_and_enter

    def before_exchange(self) -> None:
        """The rank is about to wait for the others."""
        if self._since is None or self.factor == 1:
            return
        passed = self._clock() - self._since - (self._stats.seconds - self._exchanged)
        worked = passed if self._work_clock is None else min(passed, self._work_clock() - self._computed)
        self._wait(max(0.0, self.factor * worked - passed))
        self._begin()

    def _begin(self) -> None:
        self._since, self._exchanged = self._clock(), self._stats.seconds
        self._computed = 0.0 if self._work_clock is None else self._work_clock()
