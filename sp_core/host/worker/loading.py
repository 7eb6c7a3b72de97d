"""How much of a model's weights has arrived, for the line that the user sees meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from .polling import polling

#: how often is looked how much has arrived
LOADED_POLL_S = 0.25


@contextlib.contextmanager
def loading_shown(total: int, held: Callable[[], int], show: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, ``show`` is told again and again how many per cent of ``total`` bytes have arrived.

    The host does not tell how far its loading is, so this looks at the memory that grows meanwhile.

    Args:
        held: returns the bytes that are in use now, by this process or on its device.
        show: is given 0 to 100, and 0 again when the block ends.
    """
    before = held()

    def look() -> bool:
        show(percent(held() - before, total))
        return False

    show(0)
    try:
        with polling(look, LOADED_POLL_S, "sp-loading"):
            yield
    finally:
        show(0)


def percent(arrived: int, total: int) -> int:
    """What has arrived, in per cent: at most 100, as a process needs memory for other things too."""
    return 0 if total <= 0 else min(100, max(0, arrived * 100 // total))
