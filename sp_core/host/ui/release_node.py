"""What SP Release does."""

from __future__ import annotations

from .report import size
from .session import session

#: what can be given back
RELEASES = ("weights", "workers")


def release(what: str) -> str:
    """Give back ``weights`` or ``workers``, and say in a sentence what was given back. Having nothing to give back is no error.

    Raises:
        ValueError: ``what`` is neither.
    """
    if what not in RELEASES:
        raise ValueError(f"'{what}' cannot be released; there are {', '.join(RELEASES)}")
    current = session()
    workers = sum(models.pool.world_size for models in current.pools)
    if not workers:
        return "No workers are running."
    if what == "workers":
        current.close()
        return f"Ended {workers} workers."
    return f"{size(current.release_all())} of weights taken off {workers} devices; the workers stay."
