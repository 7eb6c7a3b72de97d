"""Whether a model keeps something of a forward: an attribute of one of its modules is another one afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ..module_settings import is_managed, plain_text

#: of torch's own. Weights and children do not change in a forward, and hooks are others' business
_TORCHS = frozenset(nn.Module().__dict__) - {"_buffers"}


class KeptState:
    """What a model's modules hold now. What ComfyUI writes to manage memory does not count, nor what is written into a tensor."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._held = dict(_held(modules.items()))

    def changed(self) -> str | None:
        """The place of an attribute that is another one now, or holds more or less than before."""
        now = dict(_held(self._modules.items()))
        for place, (value, said) in now.items():
            before = self._held.get(place)
            if before is None or said != before[1] or (value is not before[0] and said is None):
                return place
        return next((place for place in self._held if place not in now), None)


def _held(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, tuple[Any, str | None]]]:
    """(place, (value, what plain data says))."""
    for path, module in modules:
        held = {name: value for name, value in vars(module).items() if name not in _TORCHS and not is_managed(name)}
        held |= held.pop("_buffers", {})
        for name, value in held.items():
            said = plain_text(value)
            if said is None and isinstance(value, (list, dict, set)):
                said = f"{type(value).__name__} {id(value)} of {len(value)}"
            yield f"{path}.{name}", (value, said)
