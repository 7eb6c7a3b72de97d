"""Looks at something again and again in a thread, while the block of a ``with`` statement runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def polling(look: Callable[[], bool], every_s: float, name: str) -> Iterator[None]:
    """A daemon thread calls ``look`` every ``every_s`` seconds, until it returns true or the block ends.

    ``look`` is not running any more when the block has been left. ``name`` is the thread's.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every_s):
            if look():
                return

    thread = threading.Thread(target=watch, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
