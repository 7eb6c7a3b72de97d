"""The times that a user can set by environment variables.

Source of the default limits: compiling a kernel or reading a large model from a slow disk takes minutes, never ten.
"""

from __future__ import annotations

import os

#: names of the variables, for messages
STALL_TIMEOUT = "SP_TIMEOUT_S"
START_TIMEOUT = "SP_START_TIMEOUT_S"
IDLE = "SP_IDLE_S"


def stall_timeout_s() -> float:
    """``SP_TIMEOUT_S``: seconds that a rank may stand still before the pool is given up; 600 where it is not set or is no number."""
    return _seconds(STALL_TIMEOUT, 600.0)


def start_timeout_s() -> float:
    """``SP_START_TIMEOUT_S``: seconds that the workers have to start and join; 180 where it is not set or is no number."""
    return _seconds(START_TIMEOUT, 180.0)


def idle_s() -> float | None:
    """``SP_IDLE_S``: seconds after which workers that nobody uses end; None where it is not set, is 0 or is no number."""
    try:
        seconds = float(os.environ.get(IDLE, 0))
    except ValueError:
        return None
    return max(1.0, seconds) if seconds > 0 else None


def _seconds(variable: str, default: float) -> float:
    try:
        return max(1.0, float(os.environ.get(variable, default)))
    except ValueError:
        return default
