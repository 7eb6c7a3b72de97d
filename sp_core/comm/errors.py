"""What can go wrong between ranks."""

from __future__ import annotations


class ExchangeError(RuntimeError):
    """An exchange between ranks did not happen; nothing of it was delivered.

    Attributes:
        rank: the rank at fault, or None where no single one is.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class TransportUnavailable(RuntimeError):
    """A transport cannot be set up here; the message is the reason, the same on every rank."""
