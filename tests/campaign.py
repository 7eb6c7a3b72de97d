"""A campaign (``SP_CAMPAIGN=1``) runs the cases that a plain run leaves out, and the full counts of the long tests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

CAMPAIGN = os.environ.get("SP_CAMPAIGN", "") not in ("", "0")
#: in a plain run a bar on time means "it does not hang", for other programs may keep every core busy meanwhile
HANGS_S = 60.0


def within(seconds: float) -> float:
    """The bar on something that takes at most ``seconds`` where nothing else runs: a campaign holds it to that."""
    return seconds if CAMPAIGN else max(seconds, HANGS_S)


def parameters(*, plain: Iterable[Any], campaign: Iterable[Any]) -> list[Any]:
    """Values for ``pytest.mark.parametrize``: those of every run, then those that only a campaign tries."""
    rows = (value if isinstance(value, tuple) else (value,) for value in campaign)
    return [*plain, *(pytest.param(*row, marks=pytest.mark.campaign) for row in rows)]


def on_devices() -> list[Any]:
    """``devices`` for what every device count has to do alike: of three nothing divides, neither tokens nor heads."""
    return parameters(plain=["cpu:3"], campaign=["cpu:2", "cpu:4"])
