"""What a user can set by environment variables: time limits, and what patches are trusted with.

Source of the defaults: compiling a kernel or reading a large model from a slow disk takes minutes, never ten.
"""

from __future__ import annotations

import os

#: names of the variables, for messages
STALL_TIMEOUT = "SP_TIMEOUT_S"
START_TIMEOUT = "SP_START_TIMEOUT_S"
TRUST_PATCHES = "SP_TRUST_PATCHES"


def stall_timeout_s() -> float:
    """``SP_TIMEOUT_S``: seconds that a rank may stand still before the pool is given up; 600 where it is not set or is no number."""
    return _seconds(STALL_TIMEOUT, 600.0)


def start_timeout_s() -> float:
    """``SP_START_TIMEOUT_S``: seconds that the workers have to start and join; 180 where it is not set or is no number."""
    return _seconds(START_TIMEOUT, 180.0)


def trust_patches() -> bool:
    """``SP_TRUST_PATCHES``: code of other packs is taken to keep tokens, heads and rows apart, whatever it does. For tests."""
    return os.environ.get(TRUST_PATCHES, "") not in ("", "0")


def _seconds(variable: str, default: float) -> float:
    try:
        return max(1.0, float(os.environ.get(variable, default)))
    except ValueError:
        return default
