"""How much of a model's weights has arrived, for the line that the user sees meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

EVERY_S = 0.25


@contextlib.contextmanager
def shown(total: int, held: Callable[[], int], show: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, a thread calls ``show`` with per cent, 0 to 100, of ``total`` bytes.

    Loading is the host's and tells nothing, so this looks at what grows meanwhile.

    Args:
        held: bytes in use now, of this process or of its device.
    """
    before, done = held(), threading.Event()

    def look() -> None:
        while not done.wait(EVERY_S):
            show(percent(held() - before, total))

    watcher = threading.Thread(target=look, name="sp-loading", daemon=True)
    show(0)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        show(0)


def percent(arrived: int, total: int) -> int:
    """What has arrived, in per cent; a process needs memory for other things too, so never more than all."""
    return 0 if total <= 0 else min(100, max(0, arrived * 100 // total))
