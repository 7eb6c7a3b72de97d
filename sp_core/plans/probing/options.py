"""Transformer options that note which of their entries a function reads, and whether it writes any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

#: what stands in these entries is seen in other ways: functions that run inside the model
FUNCTIONS = {"patches", "patches_replace", "optimized_attention_override"}


class WatchedOptions(dict[str, Any]):
    """A copy of transformer options. ``read`` and ``written`` are shared by all copies of one call."""

    def __init__(self, options: Mapping[str, Any], read: set[str], written: set[str]) -> None:
        super().__init__(options)
        self.read, self.written = read, written

    def _all(self) -> None:
        self.read.update(super().keys())

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._all()
        return super().__iter__()

    def keys(self) -> Any:
        self._all()
        return super().keys()

    def values(self) -> Any:
        self._all()
        return super().values()

    def items(self) -> Any:
        self._all()
        return super().items()

    def __reversed__(self) -> Any:
        self._all()
        return super().__reversed__()

    def __eq__(self, other: object) -> bool:
        self._all()
        return super().__eq__(other)

    def __or__(self, other: Any) -> Any:
        return {**self, **other}

    def __ror__(self, other: Any) -> Any:
        return {**other, **self}

    def copy(self) -> dict[str, Any]:
        return WatchedOptions(dict(super().items()), self.read, self.written)

    def __setitem__(self, key: str, value: Any) -> None:
        self.written.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.written.add(key)
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self.written.add(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        key, value = super().popitem()
        self.written.add(key)
        return key, value

    def clear(self) -> None:
        self.written.update(super().keys())
        super().clear()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.written.add(key)
        return super().setdefault(key, default)

    def update(self, *others: Any, **values: Any) -> None:
        self.written.update(dict(*others, **values))
        super().update(*others, **values)


def tell_back(before: Mapping[str, Any], now: dict[str, Any], original: dict[str, Any], but: Iterable[str] = ()) -> None:
    """Write into ``original`` what was changed in ``now``, a copy of it, since it was ``before``. ``but``: entries of the copy alone."""
    entries = dict(dict.items(now))
    for key in {*before, *entries} - {*but}:
        if key not in entries:
            original.pop(key, None)
        elif key not in before or entries[key] is not before[key]:
            original[key] = entries[key]


def each_options(value: Any, is_options: Callable[[Any], bool], change: Callable[[dict[str, Any]], Any]) -> Any:
    """``value``, a tree of arguments, with every transformer options in it changed."""
    if is_options(value):
        return change(value)
    if isinstance(value, dict):
        return {key: each_options(x, is_options, change) for key, x in value.items()}
    if type(value) in (tuple, list):
        return type(value)(each_options(x, is_options, change) for x in value)
    return value
