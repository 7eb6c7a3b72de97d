"""The environment variables by which a user changes what this extension does: their names, how they are read, and their defaults.

Every variable that begins with ``SP_`` is read here and nowhere else. docs/troubleshooting.md has the table for users.
"""

from __future__ import annotations

import logging
import os

#: names of the variables, for messages
STALL_TIMEOUT = "SP_TIMEOUT_S"
START_TIMEOUT = "SP_START_TIMEOUT_S"
COMPILE_TIMEOUT = "SP_COMPILE_TIMEOUT_S"
LOG_LEVEL = "SP_LOG_LEVEL"
NO_EXTENSIONS = "SP_NO_EXT"
VERIFY_RANKS = "SP_VERIFY_RANKS"
IDLE = "SP_IDLE_S"
TRUST_PATCHES = "SP_TRUST_PATCHES"
HEAD_GROUPS = "SP_HEAD_GROUPS"
SLOWED = "SP_SLOWED"

#: compiling a kernel or reading a large model from a slow disk takes minutes, never ten
DEFAULT_STALL_TIMEOUT_S = 600.0
DEFAULT_START_TIMEOUT_S = 180.0
#: max-autotune tries every kernel
DEFAULT_COMPILE_TIMEOUT_S = 3600.0
DEFAULT_LOG_LEVEL = "INFO"


def stall_timeout_s() -> float:
    """Seconds that a rank may stand still before the pool is given up; the default where the variable is no number."""
    return _seconds(STALL_TIMEOUT, DEFAULT_STALL_TIMEOUT_S)


def start_timeout_s() -> float:
    """Seconds that the workers have to start and join; the default where the variable is no number."""
    return _seconds(START_TIMEOUT, DEFAULT_START_TIMEOUT_S)


def compile_timeout_s() -> float:
    """Seconds that torch.compile may take for one graph; the default where the variable is no number."""
    return _seconds(COMPILE_TIMEOUT, DEFAULT_COMPILE_TIMEOUT_S)


def log_level() -> str:
    """From which level on the workers log, as ``logging`` names it; the default where the variable names none."""
    level = os.environ.get(LOG_LEVEL, DEFAULT_LOG_LEVEL).strip().upper()
    return level if isinstance(logging.getLevelName(level), int) else DEFAULT_LOG_LEVEL


def no_extensions() -> bool:
    """Nothing that is compiled may be used."""
    return _switch(NO_EXTENSIONS)


def verify_ranks() -> bool:
    """The ranks compare their outputs bit by bit after every forward."""
    return _switch(VERIFY_RANKS)


def _switch(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def idle_s() -> float | None:
    """Seconds after which workers that nobody uses end; None where the variable is not set, is 0 or is no number."""
    try:
        seconds = float(os.environ.get(IDLE, 0))
    except ValueError:
        return None
    return max(1.0, seconds) if seconds > 0 else None


def trust_patches() -> bool:
    """Code of other packs is taken to keep tokens, heads and rows apart, whatever it does. For tests."""
    return _switch(TRUST_PATCHES)


def head_groups() -> int:
    """Into how many groups the heads of an attention go, so that exchanges run beside it; 0 where the planner shall choose."""
    try:
        return max(0, int(os.environ.get(HEAD_GROUPS, 0)))
    except ValueError:
        return 0


def slowed() -> str:
    """Which ranks take longer than they could, for benchmarks, as :func:`sp_core.parallel.slowdown.factor_of` reads it."""
    return os.environ.get(SLOWED, "").strip()


def _seconds(variable: str, default: float) -> float:
    try:
        return max(1.0, float(os.environ.get(variable, default)))
    except ValueError:
        return default
