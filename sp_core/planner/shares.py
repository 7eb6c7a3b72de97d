"""Which part of the work each rank gets, from what ranks were measured to do in a second. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout.sharding import Weights
from ..layout.shares import Shares, uneven
from .cost import MeasuredRates

#: what the fastest rank's weight is: shares are that exact, as measurements are
STEPS = 100


def auto_shares(rates: MeasuredRates, activation_bytes: float = 0.0) -> Shares | None:
    """Shares by measured speed; None where ranks are of one kind.

    Args:
        activation_bytes: that one device would need for all tokens; a rank whose ``room`` is too small for its part gets less.
    """
    if not rates.linear:
        return None
    return uneven(Shares(in_steps(within_memory(rates.linear, rates.room, activation_bytes)), in_steps(rates.attention)))


def within_memory(speeds: Sequence[float], room: Sequence[float], needed: float) -> list[float]:
    """Parts of the whole by speed, of which none needs more memory than its rank has; the others take what it leaves.

    Where all together have too little, parts are by memory.

    Args:
        room: bytes of each rank; empty where they are not known.
        needed: bytes for the whole.
    """
    total = sum(speeds)
    parts = [speed / total for speed in speeds]
    if not room or needed <= 0:
        return parts
    most = [max(0.0, bytes_) / needed for bytes_ in room]
    if sum(most) <= 1:
        return [part / sum(most) for part in most] if sum(most) > 0 else parts
    full: set[int] = set()
    while over := [rank for rank, part in enumerate(parts) if rank not in full and part > most[rank]]:
        full.update(over)
        left = 1 - sum(most[rank] for rank in full)
        speed_left = sum(speed for rank, speed in enumerate(speeds) if rank not in full)
        parts = [most[rank] if rank in full else left * speed / speed_left for rank, speed in enumerate(speeds)]
    return parts


def in_steps(parts: Sequence[float]) -> Weights:
    """Whole numbers up to :data:`STEPS` that are to each other as ``parts`` are, at least 1."""
    return tuple(max(1, round(STEPS * part / max(parts))) for part in parts)
