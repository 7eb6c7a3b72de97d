"""Hooks at the attentions that a plan names: each call of one exchanges, and one that did not is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..attention.sequence_group import SequenceGroup
from .arguments import Arguments, names_of, parameter_names, takes
from .forward_state import Escaped, ForwardState
from .host_functions import HostFunctions
from .method_hooks import Hooked, hook_call
from .override import OVERRIDE, HeldMask, mark
from .own_heads import hook_own_heads
from .plan import Attention, Blocks
from .probing.options import tell_back


@contextlib.contextmanager
def _called_with(options: dict[str, Any], kind: type[nn.Module], attention: Attention, state: ForwardState) -> Iterator[None]:
    """Inside, the name by which the code of a module's class calls ComfyUI's attention leads to it with these transformer options.

    Code of another pack that was given whole data in between attends to all of it. A function of another pack in that place which
    takes no such options attends to what it gets, and whoever looks behind the call sees that nothing was exchanged.
    """
    name, names = attention.function, names_of(getattr(kind, attention.method))
    own = names[name]
    takes_options = takes(own, "transformer_options")

    def with_options(*args: Any, **kwargs: Any) -> Any:
        if state.whole or not takes_options:
            return own(*args, **kwargs)
        return own(*args, **{**kwargs, "transformer_options": options})

    names[name] = with_options
    try:
        yield
    finally:
        names[name] = own


class AttentionHooks:
    """Of one forward, on the ranks of ``sequence``."""

    def __init__(self, sequence: SequenceGroup, host: HostFunctions) -> None:
        self._sequence, self._host = sequence, host

    def hook(
        self, block: nn.Module, blocks: Blocks, where: list[str], state: ForwardState, undo: contextlib.ExitStack, running: bool = False
    ) -> None:
        """Hook the attentions of a block until ``undo`` closes.

        Args:
            where: says of each which it is, for messages.
            running: a call of the block runs already, so hooks at the block itself would come too late.
        """
        for attention, at in zip(blocks.attentions, where, strict=True):
            module = block.get_submodule(attention.module)
            if attention.own_heads is not None:
                hook_own_heads(module, attention.own_heads, at, state, self._sequence, undo)
            else:
                self._hook(module, attention, at, state, undo, running and module is block)

    def _hook(
        self, module: nn.Module, attention: Attention, where: str, state: ForwardState, undo: contextlib.ExitStack, running: bool
    ) -> None:
        names = parameter_names(getattr(type(module), attention.method))
        attended: list[int] = []
        marked: list[tuple[dict[str, Any], dict[str, Any]]] = []
        called = undo.enter_context(contextlib.ExitStack())

        def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Hooked:
            if not state.split or state.whole:
                return None
            call = Arguments(names, args, kwargs)
            withheld = self._hold_mask(module, attention, call)
            options = call.get("transformer_options") or {}
            marked.append((options, mark(options, state, self._sequence, attention.kind, self._host, where, withheld)))
            if attention.function:
                called.enter_context(_called_with(marked[-1][1], type(module), attention, state))
            else:
                call.set("transformer_options", marked[-1][1])
            attended.append(state.attended)
            return tuple(call.args), call.kwargs

        def after(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if not state.split or state.whole:
                return
            called.close()
            given, copied = marked.pop()
            # a patch may leave something there for the next one
            tell_back(dict(given), copied, given, (OVERRIDE,))
            if id(module) in state.foreign or state.trusts_all:
                state.self_attended += attention.kind != "replicated_queries"
                attended.pop()
                return
            options: Mapping[str, Any] = Arguments(names, args, kwargs).get("transformer_options") or {}
            if state.attended == attended.pop() and not attention.skipped(options):
                raise Escaped(where)

        hook_call(module, attention.method, before, after, undo, running=running)

    def _hold_mask(self, module: nn.Module, attention: Attention, call: Arguments) -> HeldMask | None:
        """Wrap a mask that is no tensor, so that the module hands it on to the override unread; or return it, where it is withheld."""
        rule = attention.mask
        mask = None if rule is None else call.get(rule.parameter)
        if rule is None or mask is None or (isinstance(mask, Tensor) and not rule.withheld):
            return None
        names = (rule.parameter, *rule.together_with)
        if rule.together_with:
            mask = {name: call.get(name) for name in names}
        held = HeldMask(mask, rule.attention(module, self._host), rule.in_raster, rule.heads_dim)
        if not rule.withheld:
            call.set(rule.parameter, held)
            return None
        for name in names:
            call.set(name, None)
        return held
