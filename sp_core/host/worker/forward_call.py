"""One forward of a diffusion model, as ComfyUI's process asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...planner.degrees import RequestedDegrees


@dataclass(frozen=True)
class ForwardCall:
    """Which method of the diffusion model to call, with what, and how the user wants it shared out.

    ``named`` are the method's own parameters and ``extra`` what its ``**kwargs`` take; tensors in
    them have one row for each batched conditioning. ``options`` are the transformer options
    that ComfyUI's process adds to those of the model.
    """

    method: str
    named: dict[str, Any]
    extra: dict[str, Any]
    options: dict[str, Any]
    requested: RequestedDegrees

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> ForwardCall:
        """From the body of a ``forward`` request."""
        return cls(body["method"], body["named"], body["extra"], body["options"], RequestedDegrees(**body["requested"]))

    @property
    def x(self) -> Tensor:
        """The model's input, (B, C, F, H, W); of a model with several inputs the first."""
        x = self.named["x"]
        return x[0] if isinstance(x, (list, tuple)) else x  # type: ignore[no-any-return]

    @property
    def conditionings(self) -> int:
        """How many conditionings the host batched into this call."""
        return len(self.options.get("cond_or_uncond") or (0,))
