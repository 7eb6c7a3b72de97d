"""The diffusion model as ComfyUI's process holds it: the model's class, without its weights.

A remote model is an instance of a subclass of the model's own class, so ComfyUI's code
around the inner forward (argument handling, DIFFUSION_MODEL wrappers) runs unchanged;
only ``_forward`` goes to the workers. The local module, which is never moved to a device,
answers attribute reads. Calls of methods that need weights go to the workers too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ...errors import SPError
from ...plans import SequencePlan
from ..options import name_of


class Channel(Protocol):
    """Where a remote model's calls go."""

    def forward(self, method: str, named: dict[str, Any], extra: dict[str, Any], transformer_options: dict[str, Any]) -> Any: ...

    def call(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any: ...


class RemoteMixin:
    """Overrides of a remote model; mixed in front of the model's class."""

    def __getattr__(self, name: str) -> Any:
        # only reached for what the instance and its classes lack: parameters, submodules, plain attributes
        return getattr(self.__dict__["_sp_local"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(getattr(type(self), name, None)):
            raise SPError(
                f"The model's {name} was replaced while sampling ({name_of(value)}), which has no effect on the workers. "
                "Remove the node that replaces it (a cache or guidance that patches the model's forward), or SP Model Patch"
            )
        self.__dict__[name] = value

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # ComfyUI looks here for the names of the weights, and would silently drop a LoRA for which it finds none
        state: dict[str, Any] = self.__dict__["_sp_local"].state_dict(*args, **kwargs)
        return state


def _forwarder(local_class: type, method: str) -> Callable[..., Any]:
    signature = inspect.signature(getattr(local_class, method))
    extra_name = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        named = dict(bound.arguments)
        named.pop(next(iter(signature.parameters)))
        extra = named.pop(extra_name, {}) if extra_name else {}
        options = named.pop("transformer_options", None)
        options = extra.pop("transformer_options", {}) if options is None else options
        return self._sp_channel.forward(method, named, extra, options)

    return forward


def _caller(method: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._sp_channel.call(method, args, kwargs)

    return call


def make_remote(local: torch.nn.Module, plan: SequencePlan, channel: Channel) -> torch.nn.Module:
    """A stand-in for ``local`` that computes through ``channel``."""
    local_class = type(local)
    members: dict[str, Any] = {plan.forward: _forwarder(local_class, plan.forward)}
    members |= {method: _caller(method) for method in plan.weight_methods}
    remote_class = type(f"Remote{local_class.__name__}", (RemoteMixin, local_class), members)
    remote: Any = object.__new__(remote_class)
    # what nn.Module.__init__ makes, empty: no weights, no children, nothing to move
    torch.nn.Module.__init__(remote)
    remote.__dict__["_sp_local"] = local
    remote.__dict__["_sp_channel"] = channel
    remote.__dict__["training"] = False
    return remote
