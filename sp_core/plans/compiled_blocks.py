"""Blocks that torch compiles: the engine's hooks stay around them, and inside there is nothing but the model's own code and operators.

The forward of a block's class is compiled, not that of a block, so all blocks alike share its graphs. What the operators do
follows from the call that runs at that moment (:class:`_Call`), which is made anew for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..attention import operators
from ..attention.sequence_group import SequenceGroup
from ..errors import SPError
from .arguments import Arguments, parameter_names
from .forward_state import Escaped, ForwardState
from .host_functions import HostFunctions
from .in_graph import attending_class, options_in_graph
from .method_hooks import put
from .override import OVERRIDE, ExchangedAttention
from .plan import Attention, Blocks
from .stream import tokens_of


class Compiler(Protocol):
    """Compiles functions as the user asked, each once."""

    #: the first rank with the same graphs of the block that runs: those that wait for it find them in torch's cache
    leader: int

    @property
    def dynamic(self) -> bool | None:
        """Whether sizes are free in a graph; None leaves that to torch."""
        ...

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, compiled at its first call."""
        ...

    def refused(self, function: Callable[..., Any]) -> str:
        """Why ``function`` is not compiled any more; "" where it is."""
        ...

    def refuse(self, function: Callable[..., Any], why: str) -> None:
        """Not to be compiled again."""
        ...


class CompiledBlock:
    """Stands in the place of a block's ``forward`` during one forward of the model.

    Args:
        where: of each attention of the block, in words.
        hook: puts the hooks of a block that is not compiled at its attentions.
    """

    def __init__(
        self,
        block: nn.Module,
        blocks: Blocks,
        where: list[str],
        state: ForwardState,
        sequence: SequenceGroup,
        host: HostFunctions,
        compiler: Compiler,
        hook: Callable[..., None],
    ) -> None:
        self.block, self.blocks, self.where, self.hook = block, blocks, where, hook
        self.own, self.names = block.forward, parameter_names(type(block).forward)
        self.state, self.sequence, self.host = state, sequence, host
        self.compiler = compiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Arguments(self.names, args, kwargs)
        forward = type(self.block).forward
        why = self._why_eager(call) or self.compiler.refused(forward)
        if why:
            self.state.note_uncompiled(why)
        if why or not self.state.split or self.state.whole:
            return self._eager(args, kwargs)
        self._free_tokens(call)
        options = call.get("transformer_options") or {}
        runs = _Call(self, options)
        call.set("transformer_options", options_in_graph(options, self.blocks.attentions))
        try:
            with operators.running(runs), self._attending():
                return self.compiler.compiled(forward)(self.block, *call.args, **call.kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            if isinstance(failed := getattr(error, "inner_exception", None), SPError):
                raise failed from error  # another rank failed while this one waited for its graph: no fault of the compiler
            if runs.ran:
                self.compiler.refuse(forward, sentence(error))
                raise  # other ranks have exchanged with this one: to do that again would be out of step
            self.compiler.refuse(forward, sentence(error))
            self.state.note_uncompiled(self.compiler.refused(forward))
            return self._eager(args, kwargs)

    def _free_tokens(self, call: Arguments) -> None:
        """Where ranks hold unequally many tokens, their number is free from the first graph on, so that all ranks have that one."""
        counts, dynamic = self.state.layout.counts, self.compiler.dynamic
        # where sizes are to be fixed, only ranks with equally many tokens have the same graphs
        self.compiler.leader = counts.index(counts[self.state.rank]) if dynamic is False else 0
        if len(set(counts)) == 1 or dynamic is not None:
            return
        torch._dynamo.maybe_mark_dynamic(tokens_of(self.blocks, call), self.blocks.dim)
        for name in self.blocks.shard:
            mine = tree_leaves(call.get(name))
            for part, whole in zip(mine, tree_leaves(self.state.original(call.get(name))), strict=False):
                if isinstance(part, Tensor) and isinstance(whole, Tensor) and part.ndim == whole.ndim:
                    shared_out = [dim for dim in range(part.ndim) if part.size(dim) != whole.size(dim)]
                    torch._dynamo.maybe_mark_dynamic(part, shared_out)

    def _eager(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with contextlib.ExitStack() as undo:
            put(self.block, "forward", self.own, undo)
            self.hook(undo, running=True)
            return self.block.forward(*args, **kwargs)

    def _why_eager(self, call: Arguments) -> str:
        """Why this call is not compiled, or ""."""
        if self.sequence.ring is not None:
            return "keys and values go round a ring"
        for attention in self.blocks.attentions:
            if attention.function:
                return "its attention hands no options on"
            if attention.own_heads is not None:
                return "its attention attends by itself to parts of the tokens"
            rule = attention.mask
            value = None if rule is None else call.get(rule.of_block)
            if value is not None and not isinstance(value, Tensor):
                return f"the attention has an object for a mask ({type(value).__name__})"
        return ""

    @contextlib.contextmanager
    def _attending(self) -> Iterator[None]:
        """Inside, named attentions have a class whose attention call is an operator."""
        before: list[tuple[nn.Module, type[nn.Module]]] = []
        try:
            for site, attention in enumerate(self.blocks.attentions):
                if attention.module:
                    module = self.block.get_submodule(attention.module)
                    before.append((module, type(module)))
                    module.__class__ = attending_class(type(module), site, attention)  # type: ignore[arg-type]
            yield
        finally:
            for module, kind in before:
                module.__class__ = kind


class _Call:
    """One call of a compiled block: what its operators do, see :class:`sp_core.attention.operators.BlockCall`."""

    def __init__(self, of: CompiledBlock, options: dict[str, Any]) -> None:
        self.of, self.options = of, options
        #: an attention of this call has run
        self.ran = False

    def attend(
        self,
        site: int,
        function: operators.AttentionFunction,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        options: dict[str, Any],
    ) -> Tensor:
        self.ran = True
        found = self.of.host.named(function) if isinstance(function, str) else function
        given = {**options, "transformer_options": self.options, "_inside_attn_wrapper": True}
        if site != operators.LOCAL:
            return self._exchanged(site, found, q, k, v, heads, given)
        users = self.options.get(OVERRIDE)
        return found(q, k, v, heads, **given) if users is None else users(found, q, k, v, heads, **given)  # type: ignore[no-any-return]

    def _exchanged(self, site: int, function: Any, q: Any, k: Any, v: Any, heads: int, given: dict[str, Any]) -> Tensor:
        of, attention = self.of, self._attention(site)
        exchanged = ExchangedAttention(of.state, of.sequence, attention.kind, self.options, of.host, of.where[site])
        return exchanged(function, q, k, v, heads, **given)

    def escaped(self, site: int) -> None:
        raise Escaped(self.of.where[site])

    def _attention(self, site: int) -> Attention:
        return self.of.blocks.attentions[site]


def sentence(error: BaseException) -> str:
    """The first line of what torch says, for people."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
