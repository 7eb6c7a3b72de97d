"""What can go wrong in the pool, as sentences for a person."""

from __future__ import annotations

from .. import settings
from ..errors import SPError


class WireError(SPError):
    """A value cannot cross the wire, or a message from it is malformed."""


class WorkerFailed(SPError):
    """A worker answered a request with an exception of its own."""

    def __init__(self, rank: int, message: str, kind: str = "", fatal: bool = False) -> None:
        super().__init__(f"Rank {rank} failed: {message}")
        self.rank, self.kind = rank, kind
        #: the worker cannot go on
        self.fatal = fatal


class WorkerDied(SPError):
    """A worker process ended while it was needed."""

    def __init__(self, rank: int, how: str, log_file: str) -> None:
        super().__init__(
            f"The worker of rank {rank} ended unexpectedly ({how}). The next prompt starts a new pool; "
            f"what the worker last said is in {log_file}"
        )
        self.rank = rank


class WorkerTimeout(SPError):
    """Ranks made no progress for longer than a limit; ``variable`` is the environment variable that raises this limit."""

    def __init__(self, ranks: list[int], seconds: float, doing: str, variable: str = settings.STALL_TIMEOUT, log_file: str = "") -> None:
        named = ", ".join(map(str, ranks))
        where = f" Where it stood is in {log_file}" if log_file else ""
        super().__init__(
            f"Rank {named} made no progress for {seconds:.0f} s while {doing}. The pool was stopped and the next prompt "
            f"starts a new one; if your disk or link is that slow, raise {variable}.{where}"
        )
        self.ranks = ranks


class Cancelled(SPError):
    """The user cancelled the request. Raised in a worker where it stops; and in the coordinator, which waits for no long block."""

    def __init__(self) -> None:
        super().__init__("Cancelled")


class PeerFailed(SPError):
    """This rank stopped waiting because another one failed; the other one's error is the one to show."""

    def __init__(self) -> None:
        super().__init__("stopped because another rank failed")
