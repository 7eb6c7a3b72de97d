"""The stand-in: the diffusion model as ComfyUI's process holds it, the model's class without its weights.

The stand-in is an instance of a subclass of the model's own class, so ComfyUI's code
around the inner forward (argument handling, DIFFUSION_MODEL wrappers) runs unchanged;
only ``_forward`` goes to the workers. The local module, which is never moved to a device,
answers attribute reads. Calls of methods that need weights go to the workers too.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ...errors import SPError
from ...plans import SequencePlan, base_of_pack, replaced_methods, runs_wrappers
from ...plans.kept_cache import without_memory
from ..options import name_of
from .snapshot import Change
from .watch import SwapWatch, swapped


class Channel(Protocol):
    """Where a stand-in's calls go: to a :class:`.remote_model.RemoteModel`."""

    def forward(self, method: str, named: dict[str, Any], extra: dict[str, Any], transformer_options: dict[str, Any]) -> Any: ...

    def call(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any: ...


class StandInMixin:
    """What a stand-in does otherwise; mixed in front of the model's class."""

    def __getattr__(self, name: str) -> Any:
        # only reached for what the instance and its classes lack: parameters, submodules, plain attributes
        left_by_others = self.__dict__["_sp_backup"]
        path = f"diffusion_model.{name}"
        value = left_by_others[path] if path in left_by_others else getattr(self.__dict__["_sp_local"], name)
        if isinstance(value, (torch.nn.Module, list, dict)):
            self.__dict__["_sp_watch"].handing_out()
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        watch: SwapWatch = self.__dict__["_sp_watch"]
        if self._sp_is_fixed(name):
            raise swapped(Change(name, value), watch.sampling, watch.words)
        watch.check_setting(self.__dict__["_sp_local"], name, value)
        if self.__dict__["_sp_reads_more"] and value is not None:
            raise SPError(
                f"{name} was set on the model, whose class {name_of(type(self))} has code of its own in the forward. That runs in the "
                "workers, which do not see what is set here. Remove the node that sets it, or SP Model Patch"
            )
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        elif not self._sp_is_fixed(name):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        # else somebody (unittest.mock) takes back what was refused above; an error here would hide that one

    def _sp_is_fixed(self, name: str) -> bool:
        """A method or a child of the model, which the workers have."""
        return callable(getattr(type(self), name, None)) or name in self.__dict__["_sp_local"]._modules

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # ComfyUI looks here for the names of the weights, and would silently drop a LoRA for which it finds none
        state: dict[str, Any] = self.__dict__["_sp_local"].state_dict(*args, **kwargs)
        return state

    # -- who asks the stand-in for its parts gets the model's; who walks through the BaseModel above it finds none, for ComfyUI
    # -- moves and unpatches what it finds there, and the local module is shared with branches without SP Model Patch

    def named_modules(self, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        if memo is None:
            yield prefix, self
            self.__dict__["_sp_watch"].handing_out()
            yield from islice(self.__dict__["_sp_local"].named_modules(None, prefix, remove_duplicate), 1, None)
        elif self not in memo:
            memo.add(self)
            yield prefix, self

    def named_children(self) -> Iterator[tuple[str, Any]]:
        self.__dict__["_sp_watch"].handing_out()
        yield from self.__dict__["_sp_local"].named_children()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.__dict__["_sp_local"].named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.__dict__["_sp_local"].named_buffers(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # the workers' weights lie where ComfyUI puts them there, but a dtype would be another model
        dtype = next((weight.dtype for _, weight in self.named_parameters() if weight.is_floating_point()), None)
        if dtype is not None and (other := fn(torch.empty(0, dtype=dtype)).dtype) != dtype:
            raise swapped(Change("dtype", other, before=str(dtype)), False, self.__dict__["_sp_watch"].words)
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise swapped(Change("weights", dict()), False, self.__dict__["_sp_watch"].words)

    def __deepcopy__(self, memo: Any) -> Any:
        words = self.__dict__["_sp_watch"].words
        raise SPError(
            f"The {words.what} was copied behind {words.node}, and what is changed in the copy has no effect on the workers. "
            f"Place {words.node} after the node that copies it, or remove that node"
        )

    def train(self, mode: bool = True) -> Any:
        self.__dict__["training"] = mode
        return self


def _forwarder(local_class: type, method: str, refuse_wrappers: bool) -> Callable[..., Any]:
    signature = inspect.signature(getattr(local_class, method))
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        # a pack's method that hands everything on names nothing, and where there is nothing behind it ComfyUI's call does
        base = base_of_pack(local_class)
        signature = inspect.signature(_as_comfyui_calls if base is torch.nn.Module else getattr(base, method))
    extra_name = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    # members of an enumeration of the model's own (Cosmos 1) do not travel; the workers' method has the same default
    unsent = {p.name: p.default for p in signature.parameters.values() if isinstance(p.default, Enum)}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        named = {name: value for name, value in bound.arguments.items() if name not in unsent or value is not unsent[name]}
        named.pop(next(iter(signature.parameters)))
        extra = named.pop(extra_name, {}) if extra_name else {}
        options = named.pop("transformer_options", None)
        options = extra.pop("transformer_options", {}) if options is None else options
        if refuse_wrappers and (options.get("wrappers") or {}).get("diffusion_model"):
            raise SPError(
                f"{name_of(local_class)} has a forward of its own, which runs in the workers, where the wrappers that another node put "
                "around the model (a cache) do not reach it. Remove the node that puts the wrapper there, or SP Model Patch"
            )
        self._sp_watch.check()
        return self._sp_channel.forward(method, named, extra, options)

    return forward


def _as_comfyui_calls(self: Any, x: Any, timestep: Any, **kwargs: Any) -> None:
    """How ``BaseModel.apply_model`` of ComfyUI calls every model."""


def _caller(method: str, local: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A method that the workers call. ``local`` runs here instead where no tensor comes in: it computes nothing with weights."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if local is not None and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
            return local(self, *args, **kwargs)
        return self._sp_channel.call(method, args, kwargs)

    return call


def _cache_maker(method: str, numbers: Iterator[int]) -> Callable[..., Any]:
    """A method of the model that makes caches, which makes them without memory here: the workers have them."""

    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self.__dict__["_sp_class"], method)
        bound = inspect.signature(own).bind(self, *args, **kwargs)
        if "device" in bound.arguments:
            bound.arguments["device"] = torch.device("meta")
        return without_memory(own(*bound.args, **bound.kwargs), numbers)

    return make


def make_stand_in(
    local: torch.nn.Module, local_class: type, plan: SequencePlan, channel: Channel, watch: SwapWatch, backup: Mapping[str, Any]
) -> torch.nn.Module:
    """A stand-in for ``local`` that computes through ``channel``, where ``watch`` does not object.

    Args:
        local_class: the model's own class. What ``local`` is may be a class that another branch's object patch left there.
        backup: what other branches' object patches replaced, by path.
    """
    # a forward that a pack wrote need not come to the plan's, so all of it runs in the workers
    forward = "forward" if plan.splits_tokens and "forward" in replaced_methods(local_class) else plan.forward
    refuse_wrappers = forward != plan.forward if plan.splits_tokens else forward == "forward" and runs_wrappers(local_class)
    members: dict[str, Any] = {forward: _forwarder(local_class, forward, refuse_wrappers)}
    numbers = itertools.count()
    members |= {method: _forwarder(local_class, method, False) for method in plan.further_forwards}
    members |= {method: _cache_maker(method, numbers) for method in plan.caches.values()}
    # what nobody has read may be anything
    local_methods = {} if plan.splits_tokens else {method: getattr(local_class, method) for method in plan.weight_methods}
    members |= {method: _caller(method, local_methods.get(method)) for method in plan.weight_methods}
    # packs tell a model by its class or by the name of that
    members |= {
        "__module__": local_class.__module__,
        "__qualname__": local_class.__qualname__,
        "__class__": property(lambda _: local_class),
    }
    its_class = type(local_class.__name__, (StandInMixin, local_class), members)
    stand_in: Any = object.__new__(its_class)
    # what nn.Module.__init__ makes, empty: no weights, no children, nothing to move
    torch.nn.Module.__init__(stand_in)
    # not by |=, which sets the attribute __dict__: the mixin would put the dictionary into itself, and nothing in it would ever
    # go before Python looks for circles
    stand_in.__dict__.update(_sp_local=local, _sp_class=local_class, _sp_channel=channel, _sp_watch=watch)
    stand_in.__dict__.update(_sp_backup=backup, training=False)
    # a pack's own forward may read what its other nodes set on the model
    stand_in.__dict__.update(_sp_reads_more=bool(replaced_methods(local_class)))
    return stand_in
