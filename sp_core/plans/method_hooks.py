"""Hooks around a module's forward, or around another method that its model calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

#: what a hook before a call returns: the changed arguments, or None to leave them
Hooked = tuple[tuple, dict[str, Any]] | None


def hook_call(
    module: nn.Module,
    method: str,
    before: Callable[[nn.Module, tuple, dict[str, Any]], Hooked],
    after: Callable[[nn.Module, tuple, dict[str, Any], Any], Any],
    undo: contextlib.ExitStack,
) -> None:
    """Call ``before`` and ``after`` around each call until ``undo`` closes; what ``after`` returns, if not None, is the output."""
    if method == "forward":
        undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        return
    own = getattr(module, method)

    def called(*args: Any, **kwargs: Any) -> Any:
        changed = before(module, args, kwargs)
        args, kwargs = (args, kwargs) if changed is None else changed
        output = own(*args, **kwargs)
        other = after(module, args, kwargs, output)
        return output if other is None else other

    put(module, method, called, undo)


def put(owner: nn.Module, name: str, function: Callable[..., Any], undo: contextlib.ExitStack) -> None:
    """``function`` in the place of a method of ``owner``, until ``undo`` closes."""
    had = owner.__dict__.get(name)
    owner.__dict__[name] = function
    if had is None:
        undo.callback(owner.__dict__.pop, name, None)
    else:
        undo.callback(owner.__dict__.__setitem__, name, had)
