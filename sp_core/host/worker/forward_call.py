"""One forward of a diffusion model, as ComfyUI's process asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...planner.degrees import RequestedDegrees
from ...plans.kept_cache import RankCaches


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
        inputs = self.named.get("x", self.named)
        return next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))

    def on(self, model: nn.Module, options: dict[str, Any]) -> Any:
        """What the method gives, called with ``options`` as its transformer options."""
        method = getattr(model, self.method)
        named = dict(self.named)
        # a method that hands everything on gets by place what ComfyUI gives by place
        by_place = any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(method).parameters.values())
        args = [named.pop(name) for name in list(named)[:2]] if by_place else []
        return method(*args, **named, **({"transformer_options": options} if _takes_options(method) else {}), **self.extra)

    def with_caches(self, names: Iterable[str], caches: RankCaches) -> ForwardCall:
        """The same call with the caches of this rank, of which it came with the numbers."""
        arrived = {name: caches.arrived(self.named[name]) for name in names if name in self.named}
        return replace(self, named={**self.named, **arrived}) if arrived else self

    def numbers_of(self, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """Of the caches, their numbers as they are now."""
        return {name: [cache.numbers for cache in self.named[name]] for name in names if name in self.named}

    @property
    def conditionings(self) -> int:
        """How many conditionings the host batched into this call."""
        return len(self.options.get("cond_or_uncond") or (0,))


def _takes_options(method: Callable[..., Any]) -> bool:
    """CausalWan's ``forward_block`` takes none, so that its blocks run without any."""
    parameters = inspect.signature(method).parameters
    return "transformer_options" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
