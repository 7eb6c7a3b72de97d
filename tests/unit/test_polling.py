"""What is watched while a block runs, and not a moment longer."""

from __future__ import annotations

import threading

import pytest

from sp_core.host.worker.loading import loading_shown, percent
from sp_core.host.worker.polling import polling

WAIT_S = 10


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_looks_until_it_has_seen_enough() -> None:
    looks, enough = [], threading.Event()

    def look() -> bool:
        looks.append(threading.current_thread().name)
        if len(looks) == 3:
            enough.set()
        return enough.is_set()

    with polling(look, 0.001, "sp-test"):
        assert enough.wait(WAIT_S)
    assert looks == ["sp-test"] * 3


def test_nobody_looks_behind_a_block_that_fails() -> None:
    def fail() -> None:
        with polling(lambda: False, 0.001, "sp-test"):
            assert "sp-test" in names()
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        fail()
    assert "sp-test" not in names()


def test_loading_is_shown_from_nothing_and_taken_back() -> None:
    shown, half = [], threading.Event()

    def show(per_cent: int) -> None:
        shown.append(per_cent)
        if per_cent == 50:
            half.set()

    held = [1000]
    with loading_shown(200, lambda: held[0], show):
        held[0] += 100
        assert half.wait(WAIT_S)
    assert shown[0] == 0 and shown[-1] == 0 and set(shown) == {0, 50}


@pytest.mark.parametrize(("arrived", "total", "expected"), [(0, 10, 0), (5, 10, 50), (20, 10, 100), (-3, 10, 0), (5, 0, 0)])
def test_percent(arrived: int, total: int, expected: int) -> None:
    assert percent(arrived, total) == expected
