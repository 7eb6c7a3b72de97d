"""The states of the generators that code may draw from, to see whether it drew and to take the draws back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """The states of torch's, Python's and numpy's generators at this moment, of the CPU and of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._now()

    def _now(self) -> list[Any]:
        # numpy is looked at where somebody imported it
        numpy = sys.modules.get("numpy")
        drawn = None if numpy is None else [part.tobytes() if hasattr(part, "tobytes") else part for part in numpy.random.get_state()]
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return [torch.get_rng_state(), on_device, random.getstate(), drawn]

    def changed(self) -> bool:
        """Something was drawn since."""
        pairs = zip(self._states, self._now(), strict=True)
        return not all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)

    def restore(self) -> None:
        """The next draw is what it would have been at this object's moment."""
        torch.set_rng_state(self._states[0])
        if self._states[1] is not None:
            torch.cuda.set_rng_state(self._states[1], self._device)
        random.setstate(self._states[2])
        if self._states[3] is not None:
            numpy = sys.modules["numpy"]
            kind, keys, *rest = self._states[3]
            numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
