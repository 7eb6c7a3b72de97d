"""Blocks that a guidance leaves out for one forward, as plain data that crosses to the workers.

A guidance leaves a block out by replacing it with a function that returns what it was given. ComfyUI's process takes such
functions out of the options (:func:`take_skips`), and a worker puts functions of its own in their place (:func:`put_skips`).
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

#: the entry of the options that crosses: a list of [name, kind, number], one for each block
SKIPPED = "sp_skipped_blocks"


class _Sealed(dict):
    """Arguments that nobody may look into."""

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        raise LookupError

    __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = __bool__ = __or__ = _read  # type: ignore[assignment]
    get = keys = items = values = copy = pop = update = setdefault = _read  # type: ignore[assignment]


def leaves_out_its_block(function: Any) -> bool:
    """True for a block replacement that returns its arguments without looking at them, whatever they hold.

    It is called to see. So it has to be a function that keeps nothing, which this call could change.
    """
    if not isinstance(function, FunctionType) or function.__closure__ or vars(function):
        return False
    arguments = _Sealed()
    try:
        return function(arguments, _Sealed()) is arguments
    except Exception:
        return False


def take_skips(transformer_options: dict[str, Any]) -> tuple[dict[str, Any], list[list[Any]]]:
    """In ComfyUI's process: the options without their block skips, and the skips as plain data."""
    replaced = transformer_options.get("patches_replace") or {}
    skips = [
        [name, *place]
        for name, places in replaced.items()
        for place, function in places.items()
        if isinstance(place, tuple) and leaves_out_its_block(function)
    ]
    if not skips:
        return transformer_options, []
    taken = {(name, tuple(place)) for name, *place in skips}
    rest = {name: {p: f for p, f in places.items() if (name, p) not in taken} for name, places in replaced.items()}
    return {**transformer_options, "patches_replace": rest}, skips


def put_skips(options: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the options with every skip as a block replacement again."""
    skips = options.pop(SKIPPED, None) or []
    replaced = {name: dict(places) for name, places in (options.get("patches_replace") or {}).items()}
    for name, *place in skips:
        replaced.setdefault(name, {})[tuple(place)] = _skip
    return {**options, "patches_replace": replaced} if skips else options


def _skip(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    return arguments
