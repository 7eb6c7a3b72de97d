"""The Cancel button inside a worker that runs the user's graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from .. import comfy_api
from .polling import polling

#: how often is looked whether the user cancels
CANCEL_POLL_S = 0.05


@contextlib.contextmanager
def interruptible(cancelled: Callable[[], bool]) -> Iterator[None]:
    """While the block runs, ``cancelled`` becoming true interrupts the host's executor before its next node."""

    def look() -> bool:
        if not cancelled():
            return False
        comfy_api.set_interrupt(True)
        return True

    try:
        with polling(look, CANCEL_POLL_S, "sp-interrupt"):
            yield
    finally:
        # the executor may have ended before it saw the request
        comfy_api.set_interrupt(False)
