"""The Cancel button inside a worker that runs the user's graph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from .. import comfy_api

POLL_S = 0.05


@contextlib.contextmanager
def interruptible(cancelled: Callable[[], bool]) -> Iterator[None]:
    """While the block runs, ``cancelled`` becoming true interrupts the host's executor before its next node."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            if cancelled():
                comfy_api.set_interrupt(True)
                return

    thread = threading.Thread(target=watch, name="sp-interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        # the executor may have ended before it saw the request
        comfy_api.set_interrupt(False)
