"""Compiles functions with torch as a user asked, counts the graphs, and says why a graph is not compiled."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from .compiled_blocks import sentence

log = logging.getLogger(__name__)

#: graphs of one function that torch keeps: a model may see many sizes
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class CompileWish:
    """What a user asked of ``torch.compile``, as plain data that can be compared."""

    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    #: (name, value), sorted
    options: tuple[tuple[str, Any], ...] = ()

    def describe(self) -> str:
        """In few words, for the report."""
        said = [self.backend]
        said += [f"mode {self.mode}"] if self.mode else []
        said += [f"dynamic {self.dynamic}".lower()] if self.dynamic is not None else []
        said += ["full graph"] if self.fullgraph else []
        return ", ".join([*said, *(f"{name} {value}" for name, value in self.options)])


@dataclass
class BlockCompiler:
    """Compiles functions by one wish; see :class:`.compiled_blocks.Compiler`.

    It is kept as long as the process, for torch compiles anew for another object in its place.

    Args:
        phase: around the compiling of each graph; is told which rank compiles it for all that have the same.
        on_refusal: called when a function failed to compile on this rank.
    """

    wish: CompileWish
    phase: Callable[[int], AbstractContextManager[None]] = lambda leader: contextlib.nullcontext()
    on_refusal: Callable[[], None] = lambda: None
    #: graphs that were compiled, and the seconds that took, waiting for others included
    graphs: int = 0
    seconds: float = 0.0
    #: what is not compiled any more, by :func:`qualified_name` -> why. Equal on all ranks from the next forward on
    refusals: dict[str, str] = field(default_factory=dict)
    #: see :class:`.compiled_blocks.Compiler`
    leader: int = 0
    _compiled: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # of the whole process, as torch has them
        config = torch._dynamo.config
        config.recompile_limit = max(RECOMPILE_LIMIT, config.recompile_limit)
        # blocks that know their number (VACE) share a graph
        config.allow_unspec_int_on_nn_module = True

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if function not in self._compiled:
            wish, backend = self.wish, functools.partial(self._backend, function)
            self._compiled[function] = torch.compile(function, backend=backend, dynamic=wish.dynamic, fullgraph=wish.fullgraph)
        return self._compiled[function]

    @property
    def dynamic(self) -> bool | None:
        return self.wish.dynamic

    def refused(self, function: Callable[..., Any]) -> str:
        return self.refusals.get(qualified_name(function), "")

    def refuse(self, function: Callable[..., Any], why: str) -> None:
        log.warning("SP: %s is not compiled: %s", function.__qualname__, why)
        self.refusals[qualified_name(function)] = f"torch.compile failed: {why}"
        self.on_refusal()

    def describe(self, calls_uncompiled: Mapping[str, int]) -> str:
        """What became of the wish, for the report.

        Args:
            calls_uncompiled: of the last forward, see :attr:`.forward_state.ForwardState.uncompiled`.
        """
        why = dict.fromkeys([*calls_uncompiled, *self.refusals.values()])
        not_compiled = "; ".join(f"not compiled: {reason}" for reason in why)
        if not self.graphs:
            return f"torch.compile ({self.wish.describe()}): {not_compiled or 'nothing was compiled'}"
        graphs = f"{self.graphs} {'graph' if self.graphs == 1 else 'graphs'} in {self.seconds:.1f} s"
        return f"torch.compile ({self.wish.describe()}): {graphs}" + (f"; {not_compiled}" if not_compiled else "")

    def _backend(self, function: Callable[..., Any], graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        started = time.perf_counter()
        with self.phase(self.leader):
            try:
                compiled = self._by_backend(graph, inputs)
            except Exception as error:
                # computing it uncompiled is right; only slower
                log.warning("SP: %s failed; the graph runs uncompiled", self.wish.backend, exc_info=True)
                self.refuse(function, f"{self.wish.backend}: {sentence(error)}")
                compiled = graph.forward
        self.graphs += 1
        self.seconds += time.perf_counter() - started
        return compiled

    def _by_backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        wish, options = self.wish, dict(self.wish.options)
        if wish.backend == "inductor":
            import torch._inductor as inductor

            by_mode = inductor.list_mode_options(wish.mode, wish.dynamic) if wish.mode else {}
            return inductor.compile(graph, inputs, options=by_mode | options)  # type: ignore[no-any-return]
        given = ({"mode": wish.mode} if wish.mode else {}) | ({"options": options} if options else {})
        return torch._dynamo.lookup_backend(wish.backend)(graph, inputs, **given)  # type: ignore[no-any-return]


def qualified_name(function: Callable[..., Any]) -> str:
    """The name of a function on every rank."""
    return f"{function.__module__}.{function.__qualname__}"
