"""Which transport is taken when several work, as a function of their times."""

from __future__ import annotations

import pytest
import torch

from sp_core.comm.fastest import MARGIN_CPU, TIMED_BYTES, TIMED_BYTES_CPU, figures, pick, timed_bytes


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ({"nccl": 0.004}, "nccl"),
        ({"peer": 0.001, "nccl": 0.002}, "peer"),
        # direct writes between sockets, slower than by way of host memory
        ({"peer": 0.009, "nccl": 0.004}, "nccl"),
        # a difference that the next measurement may turn round does not count
        ({"peer": 0.00105, "nccl": 0.001}, "peer"),
        ({"peer": 0.00111, "nccl": 0.001}, "nccl"),
        # not the first that is better than the one before it, but the first that none beats
        ({"peer": 0.009, "peer-copy": 0.006, "nccl": 0.004}, "nccl"),
        ({"peer": 0.009, "peer-copy": 0.0042, "nccl": 0.004}, "peer-copy"),
        ({"a": 0.0, "b": 0.0}, "a"),
    ],
)
def test_the_first_that_no_other_beats_clearly_is_taken(seconds: dict[str, float], taken: str) -> None:
    assert pick(seconds) == taken


def test_on_cpu_ranks_a_busy_processor_turns_nothing_round() -> None:
    assert pick({"shm": 0.0029, "gloo": 0.001}, MARGIN_CPU) == "shm"
    assert pick({"shm": 0.0031, "gloo": 0.001}, MARGIN_CPU) == "gloo"


def test_figures_are_read_by_people() -> None:
    assert figures({"shm": 0.00041, "gloo": 0.0123}, 786_432) == "0.79 MB take 0.41 ms by shm, 12.30 ms by gloo"


@pytest.mark.parametrize(
    ("device", "at_hand", "size"),
    [
        ("cpu", None, TIMED_BYTES_CPU),
        ("cpu", 0, TIMED_BYTES_CPU),
        ("cpu", 1 << 30, TIMED_BYTES_CPU),
        # sizes that are close to each other are timed once
        ("cpu", 5000, 8192),
        ("cpu", 8192, 8192),
        ("cuda", None, TIMED_BYTES),
        ("cuda", 3 << 20, 4 << 20),
        ("cuda", 1 << 30, TIMED_BYTES),
    ],
)
def test_what_is_at_hand_is_timed_as_far_as_that_is_quick(device: str, at_hand: int | None, size: int) -> None:
    assert timed_bytes(torch.device(device), at_hand) == size
