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
    hook_inside: Callable[[], None] = lambda: None,
    *,
    running: bool = False,
) -> None:
    """Call ``before`` and ``after`` around each call until ``undo`` closes; what ``after`` returns, if not None, is the output.

    Args:
        hook_inside: sets the hooks of what lies inside the module. That can be the module itself, as of a block that attends itself:
            its hooks come behind ``before`` and before ``after``.
        running: a call of the module runs already and goes on to its method, so hooks of torch's would come too late.
    """
    if method == "forward" and not running:
        undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        hook_inside()
        undo.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        return
    hook_inside()
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
