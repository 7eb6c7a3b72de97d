"""What the dicts and lists of a call hold, so that a change is seen, and the call can be computed again as if for the first time."""

from __future__ import annotations

from operator import is_not
from typing import Any


class Contents:
    """Of all dicts and lists in ``trees``, nested ones too. They stay the same objects: others may look for what changes in them."""

    def __init__(self, *trees: Any) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        seen: set[int] = set()
        for tree in trees:
            self._look_into(tree, seen)

    def _look_into(self, value: Any, seen: set[int]) -> None:
        if type(value) not in (dict, list, tuple) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict):
            self._dicts.append((value, dict(value)))
        elif isinstance(value, list):
            self._lists.append((value, list(value)))
        for part in value.values() if isinstance(value, dict) else value:
            self._look_into(part, seen)

    def changed(self) -> bool:
        """Something was put into them or taken out."""
        return any(_differ(dict(now), then) for now, then in self._dicts) or any(
            len(now) != len(then) or any(map(is_not, now, then)) for now, then in self._lists
        )

    def put_back(self) -> None:
        """Undo what was put into them or taken out since."""
        for mapping, held in self._dicts:
            mapping.clear()
            mapping.update(held)
        for items, members in self._lists:
            items[:] = members


def _differ(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    return now.keys() != then.keys() or any(now[key] is not value for key, value in then.items())
