"""Numbers that the coordinator and the workers agree on."""

import os
from datetime import timedelta
from enum import IntEnum

#: a worker has this long to join the control group after its process started
CONNECT_TIMEOUT_S = 180.0
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


def timeout_s() -> float:
    """SP_TIMEOUT_S: how long a rank may stand still."""
    try:
        return max(1.0, float(os.environ.get("SP_TIMEOUT_S", "600")))
    except ValueError:
        return 600.0
