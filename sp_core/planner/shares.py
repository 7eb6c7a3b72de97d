"""Which part of the work each rank gets, from what ranks were measured to do in a second. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layout.sharding import Weights
from ..layout.shares import Shares, uneven
from .cost import MeasuredRates

#: what the fastest rank's weight is: shares are that exact, as measurements are
STEPS = 100
#: so much faster or slower than its shares say must a rank have been over a run before the next run's shares follow
HYSTERESIS = 1.15


@dataclass(frozen=True)
class Balance:
    """How ranks did over a run: ``pace[r]`` is how many times as long rank r took as its measured rates say, the fastest 1."""

    pace: tuple[float, ...] = ()

    def after(self, found: Sequence[float]) -> Balance:
        """The balance behind a run in which ranks were ``found`` to take so long, on their measured rates, for what they did.

        It stays as it is until some rank is off by more than :data:`HYSTERESIS`, so that shares do not follow noise.
        """
        if not found or min(found) <= 0:
            return self
        pace = tuple(taken / min(found) for taken in found)
        known = self.pace or (1.0,) * len(pace)
        # of ranks that are all slower by as much nothing changes
        off = [new / old for new, old in zip(pace, known, strict=True)]
        if max(off) / min(off) <= HYSTERESIS:
            return self
        return Balance(() if max(pace) <= HYSTERESIS else pace)


def auto_shares(rates: MeasuredRates, activation_bytes: float = 0.0, balance: Balance | None = None) -> Shares | None:
    """Shares by measured speed; None where ranks are of one kind and none was slower than the others.

    Args:
        activation_bytes: that one device would need for all tokens; a rank whose ``room`` is too small for its part gets less.
        balance: how ranks did over the last run.
    """
    pace = balance.pace if balance is not None else ()
    if not rates.linear and not pace:
        return None
    ranks = len(rates.linear or pace)
    linear, attention = (rate or (rates.flops,) * ranks for rate in (rates.linear, rates.attention))
    slower = pace or (1.0,) * ranks
    tokens = [rate / times for rate, times in zip(linear, slower, strict=True)]
    heads = [rate / times for rate, times in zip(attention, slower, strict=True)]
    return uneven(Shares(in_steps(within_memory(tokens, rates.room, activation_bytes)), in_steps(heads)))


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
