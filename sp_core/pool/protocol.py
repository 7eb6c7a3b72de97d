"""Numbers that the coordinator and the workers agree on."""

from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

#: once all processes are there, the control group is made in this time
HANDSHAKE_TIMEOUT_S = 30.0
#: of the workers' process groups: the coordinator watches progress and stops the pool; this clock is only a last resort
GROUP_TIMEOUT = timedelta(hours=12)


class Op(IntEnum):
    """Frames to a worker."""

    REQUEST = 1
    SHUTDOWN = 2


class ReplyStatus(IntEnum):
    """Frames from a worker."""

    READY = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4


@dataclass(frozen=True)
class FromEachRank:
    """What a service returns where the coordinator gets every rank's value, and not rank 0's alone."""

    value: Any
