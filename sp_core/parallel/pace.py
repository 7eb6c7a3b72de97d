"""How long ranks really took over a sampling run, against what their measured rates say."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from .. import settings
from ..comm import TransportStats
from ..comm.small_collectives import all_gather_ints
from .slowdown import Slowdown, factor_of


class Pace:
    """Of one rank: seconds in which it computed, and in which it would have by its rates, since the last run began.

    An accelerator's exchanges only start when they are called, so there nothing is known. CPU workers share their cores with
    whatever runs there, so of them it is asked only where some are slowed down on purpose.
    """

    def __init__(self, stats: TransportStats, device: torch.device) -> None:
        """``stats``: those that all exchanges of this rank count into."""
        self._stats, self._device = stats, device
        self._slowdown = Slowdown(stats)
        self._computed_s = self._expected_s = 0.0
        #: of the forward at hand, by the rank's rates; 0 where nobody can say
        self.expected_s = 0.0

    def factor(self, rank: int) -> float:
        """How many times as long ``rank`` is made to take."""
        return factor_of(settings.slowed(), rank)

    def entering(self, enter: Callable[[], None]) -> Callable[[], None]:
        """What a transport calls when this rank is about to wait for the others."""

        def wait_and_enter() -> None:
            self._slowdown.before_exchange()
            enter()

        return wait_and_enter

    @contextlib.contextmanager
    def forward(self) -> Iterator[Pace]:
        """Around one forward, whose statistics begin anew in it."""
        self.expected_s = 0.0
        self._stats.reset()
        started = time.perf_counter()
        self._slowdown.begin()
        yield self
        self._slowdown.end()
        if self.expected_s:
            self._computed_s += time.perf_counter() - started - self._stats.seconds
            self._expected_s += self.expected_s

    def of_all_ranks(self, rank: int) -> list[float]:
        """How many times as long as expected each rank took since this was called last; empty where nobody knows. Collective."""
        mine = self._computed_s / self._expected_s if self._expected_s else 0.0
        self._computed_s = self._expected_s = 0.0
        self._slowdown.factor = self.factor(rank)
        if self._device.type != "cpu" or not settings.may_be_slowed():
            return []
        return [micro / 1e6 for (micro,) in all_gather_ints(None, [int(mine * 1e6)])]
