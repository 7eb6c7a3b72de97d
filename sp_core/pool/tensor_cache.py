"""The coordinator's record of the tensors that the workers already hold.

Conditioning has the same values step after step, but ComfyUI builds a new tensor each
time. The coordinator keeps a copy of what it sent and compares by value: 1 MB compares in
well under a millisecond, and a tensor that changed in place is never taken for the old one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import wire

#: values kept for one place of the request: cond and uncond of two stages take four
PER_PATH = 8
#: smaller tensors are not worth a name
SMALLEST = 1024


@dataclass
class TensorCache:
    """Copies of the tensors that were sent, by their place in the request."""

    _by_path: dict[str, OrderedDict[int, Tensor]] = field(default_factory=dict)
    _next: int = 1
    _forgotten: list[int] = field(default_factory=list)

    def entry(self, path: str, tensor: Tensor) -> dict[str, Any]:
        """Table entry for :func:`wire.pack`: a reference if the workers hold this value, else a name to keep it under."""
        if tensor.numel() * tensor.element_size() < SMALLEST:
            return {}
        known = self._by_path.setdefault(path, OrderedDict())
        for name, value in reversed(known.items()):
            if _same(value, tensor):
                known.move_to_end(name)
                return {"cached": name}
        name, self._next = self._next, self._next + 1
        known[name] = _copy_of(tensor)
        if len(known) > PER_PATH:
            self._forgotten.append(known.popitem(last=False)[0])
        return {"store": name}

    def forget_all(self) -> None:
        """Let go of everything; the next request tells the workers."""
        for known in self._by_path.values():
            self._forgotten += known
        self._by_path.clear()

    def take_forgotten(self) -> list[int]:
        forgotten, self._forgotten = self._forgotten, []
        return forgotten


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    there, here = wire.bytes_of(a), wire.bytes_of(b)
    if there is None or here is None:
        return torch.equal(a, b)
    return bool((there == here).all())


def _copy_of(tensor: Tensor) -> Tensor:
    raw = wire.bytes_of(tensor)
    if raw is None:
        return tensor.detach().clone()
    return torch.from_numpy(raw.copy()).view(tensor.dtype).view(tensor.shape)
