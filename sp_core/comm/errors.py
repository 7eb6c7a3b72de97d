"""What can go wrong between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SPError


class ExchangeError(SPError):
    """An exchange between ranks did not happen; nothing of it was delivered.

    Attributes:
        rank: the rank at fault, or None where no single one is.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class TransportUnavailable(RuntimeError):
    """A transport cannot be set up here; the message is the reason, the same on every rank.

    It is no SPError, for nobody is shown it: the choice of a transport goes on to the next one and reports the reason.
    """


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 1, 3"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
