"""Ranks that are slowed down on purpose: who, and how long they wait before an exchange."""

from __future__ import annotations

import pytest

from sp_core.comm import TransportStats
from sp_core.errors import SPError
from sp_core.parallel.slowdown import Slowdown, factor_of


@pytest.mark.parametrize(
    ("text", "rank", "factor"),
    [("", 0, 1.0), ("1:2", 0, 1.0), ("1:2", 1, 2.0), ("1:2, 2:3.5", 2, 3.5), ("0:1", 0, 1.0)],
)
def test_which_rank_is_slowed(text: str, rank: int, factor: float) -> None:
    assert factor_of(text, rank) == factor


@pytest.mark.parametrize("text", ["1", "one:2", "1:fast", "1:0.5"])
def test_what_slows_no_rank_is_refused(text: str) -> None:
    with pytest.raises(SPError, match=r"slows no rank down|no rank can take less"):
        factor_of(text, 1)


class Time:
    """A clock that goes on only where the test, or the waiting rank, lets it."""

    def __init__(self) -> None:
        self.now, self.waited = 0.0, []

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds


def test_a_slowed_rank_waits_in_proportion_to_its_work_and_not_to_its_exchanges() -> None:
    time, stats = Time(), TransportStats()
    slowdown = Slowdown(stats, time.wait, lambda: time.now)
    slowdown.factor = 3.0
    entered: list[float] = []
    enter = slowdown.entering(lambda: entered.append(time.now))
    with slowdown.forward():
        time.now += 0.5  # work
        enter()
        assert (time.waited, entered) == ([1.0], [1.5])
        time.now += 10.0
        stats.seconds += 10.0  # an exchange
        time.now += 0.25
        enter()
        assert time.waited == [1.0, 0.5]
        time.now += 1.0
    assert time.waited == [1.0, 0.5, 2.0]
    time.now += 9.0
    enter()  # outside a forward
    assert len(time.waited) == 3


def test_what_passes_while_a_rank_waits_for_a_core_counts_towards_its_wait() -> None:
    time, core = Time(), Time()
    slowdown = Slowdown(TransportStats(), time.wait, lambda: time.now, work_clock=lambda: core.now)
    slowdown.factor = 3.0
    with slowdown.forward():
        time.now += 0.75  # half a second of work, a quarter without a core
        core.now += 0.5
        slowdown.before_exchange()
        assert time.waited == [0.75]
        time.now += 2.0  # no core for longer than the work is to take
        core.now += 0.5
    assert time.waited == [0.75, 0.0]


def test_a_rank_at_full_speed_never_waits() -> None:
    time = Time()
    slowdown = Slowdown(TransportStats(), time.wait, lambda: time.now)
    with slowdown.forward():
        time.now += 1
        slowdown.before_exchange()
    assert time.waited == []


def test_a_forward_that_fails_leaves_no_wait_behind() -> None:
    time = Time()
    slowdown = Slowdown(TransportStats(), time.wait, lambda: time.now)
    slowdown.factor = 2.0
    with pytest.raises(ZeroDivisionError), slowdown.forward():
        time.wait(1 / 0)
    slowdown.before_exchange()
    assert time.waited == []
