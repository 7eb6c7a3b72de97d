"""Methods that are compared take turns, so that a busy machine is equally busy for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import TypeVar

Sample = TypeVar("Sample")


def taken_in_turns(methods: Mapping[str, Callable[[], Sample]], samples: int, warm_up: int = 1) -> dict[str, list[Sample]]:
    """What each method returned, call by call, without the first ``warm_up`` calls."""
    taken: dict[str, list[Sample]] = {name: [] for name in methods}
    for number in range(warm_up + samples):
        for name, method in methods.items():
            value = method()
            if number >= warm_up:
                taken[name].append(value)
    return taken


def turns(methods: Mapping[str, Callable[[], float]], samples: int, warm_up: int = 1) -> dict[str, float]:
    """Median of what each method returns."""
    return {name: median(values) for name, values in taken_in_turns(methods, samples, warm_up).items()}
