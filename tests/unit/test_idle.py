"""When workers that nobody uses end."""

from __future__ import annotations

import pytest

from sp_core import settings
from sp_core.host.ui.idle import IdleClock

#: (seconds since the pool was made, a prompt that uses it runs, requests up to then)
Look = tuple[float, bool, int]


@pytest.mark.parametrize(
    ("looks", "over"),
    [
        ([(9, False, 3), (10, False, 3)], [False, True]),
        ([(9, True, 3), (18, False, 3), (19, False, 3)], [False, False, True]),  # a prompt ran at the first look
        ([(9, False, 4), (18, False, 4), (19, False, 4)], [False, False, True]),  # and between two looks one came and went
        ([(9, True, 3), (100, True, 3)], [False, False]),  # a long one
        ([(10, False, 3), (11, False, 3)], [True, True]),  # it was taken in use while it should end: it is asked again
    ],
)
def test_a_pool_is_idle_from_its_last_use_on(looks: list[Look], over: list[bool]) -> None:
    clock = IdleClock(10.0, 3, 0.0)
    assert [clock.is_over(in_use, requests, now) for now, in_use, requests in looks] == over


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, None), ("0", None), ("-1", None), ("soon", None), ("nan", None), ("0.2", 1.0), ("900", 900.0)]
)
def test_the_idle_time_is_off_unless_it_is_set(monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float | None) -> None:
    monkeypatch.delenv(settings.IDLE, raising=False)
    if text is not None:
        monkeypatch.setenv(settings.IDLE, text)
    assert settings.idle_s() == seconds
