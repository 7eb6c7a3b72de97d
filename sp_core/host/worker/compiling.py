"""Grants in a worker what a compile node asked for: decides whether the blocks of a model are compiled, and by what."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...parallel.groups import ParallelGroups
from ...plans.block_compiler import BlockCompiler, CompileWish
from ...plans.forward_state import ForwardState
from ...plans.override import OVERRIDE
from ...pool.errors import PeerFailed
from ...pool.shared_state import Phase
from ...pool.worker import WorkerContext
from .. import options as model_options
from ..compiled import WISH
from .agreed import agree
from .forward_call import ForwardCall
from .patch_check import code_inside
from .residency import LoadedModel

log = logging.getLogger(__name__)

#: the leader begins to compile a graph at most so many seconds behind the others, else it has another one
TRACED_S = 60.0
#: a leader that left the forward before its exchange has failed, and in this time the coordinator says so
HEARD_S = 2.0
#: modes that make CUDA graphs, and what comes nearest without them
_WITHOUT_CUDA_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs", "default": None}
_CUDA_GRAPHS = "CUDA graphs cannot hold an exchange between devices"
#: in the place of a function's name: no block is compiled
_EVERYTHING = ""
_CUDA_GRAPHS_OPTION = "triton.cudagraphs"


@dataclass(frozen=True)
class Granted:
    """What comes of a wish."""

    #: None: nothing is compiled
    compiler: BlockCompiler | None = None
    #: why not, or what was changed about the wish
    said: str = ""

    def told(self, state: ForwardState, elsewhere: Sequence[int] = ()) -> str:
        """For the report; "" where nobody asked for anything.

        Args:
            elsewhere: other ranks on which something failed to compile in this forward.
        """
        if self.compiler is None:
            return self.said and f"torch.compile: not compiled: {self.said}"
        ranks = " and ".join(map(str, elsewhere))
        failed = f"; compiling failed on rank {ranks}, whose lines in the console say why" if ranks else ""
        return self.compiler.describe(state.uncompiled) + (f"; {self.said}" if self.said else "") + failed


class Compilers:
    """The compilers of a worker. They are kept, as what they compiled is good for the next model of the same architecture."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._compilers: dict[tuple[str, CompileWish], BlockCompiler] = {}

    def grant(self, model: LoadedModel, call: ForwardCall, groups: ParallelGroups, forbidden: str = "") -> Granted:
        """How the blocks of a forward run, equally on all ranks. Collective, where there is a wish and nothing is forbidden.

        Args:
            forbidden: why nothing can be compiled, of what only the caller knows; the same on all ranks.
        """
        # of a node behind SP Model Patch, if there is one
        asked = call.options.get(WISH) or model.compile_wish
        if asked is None:
            return Granted()
        wish, said = wish_of(asked)
        if wish is None:
            return Granted(None, said)
        why = why_not(model, call, groups)
        if forbidden:
            return Granted(None, why or forbidden)
        compiler = None if why else self._compiler(model.plan.architecture, wish)
        reasons = agree({_EVERYTHING: why} if compiler is None else compiler.refusals, self._context.rank, groups, call.x.device)
        if compiler is None or _EVERYTHING in reasons:
            return Granted(None, reasons[_EVERYTHING])
        compiler.refusals |= reasons
        return Granted(compiler, said)

    def told(self, granted: Granted, state: ForwardState) -> str:
        """For the report: what came of a wish in a forward."""
        failed = [rank for rank, shown in enumerate(self._context.shared_state.ranks) if shown.failed_to_compile]
        # what failed here tells its reason itself
        return granted.told(state, [] if self._context.rank in failed else failed)

    def _compiler(self, architecture: str, wish: CompileWish) -> BlockCompiler:
        key = (architecture, wish)
        if key not in self._compilers:
            context = self._context
            # other backends have no cache that processes share
            waits = wish.backend == "inductor"
            self._compilers[key] = BlockCompiler(
                wish,
                phase=lambda leader: compile_phase(context, leader if waits else context.rank),
                on_refusal=context.own_state.show_failed_to_compile,
            )
        return self._compilers[key]


def wish_of(asked: Mapping[str, Any]) -> tuple[CompileWish | None, str]:
    """The wish as it can be granted, and what was changed about it; None where it cannot be, and why.

    Args:
        asked: see :func:`..compiled.plain_wish`.
    """
    if asked["backend"] == "cudagraphs":
        return None, _CUDA_GRAPHS
    mode, options = asked["mode"] or None, dict(asked["options"])
    changed = []
    if mode in _WITHOUT_CUDA_GRAPHS:
        less = _WITHOUT_CUDA_GRAPHS[mode]
        changed += [f"mode {mode} became {less or 'default'}, as {_CUDA_GRAPHS}"] if mode != "default" else []
        mode = less
    if options.pop(_CUDA_GRAPHS_OPTION, False):
        changed.append(f"{_CUDA_GRAPHS_OPTION} is off, as {_CUDA_GRAPHS}")
    return CompileWish(asked["backend"], mode, asked["dynamic"], asked["fullgraph"], tuple(sorted(options.items()))), "; ".join(changed)


def why_not(model: LoadedModel, call: ForwardCall, groups: ParallelGroups) -> str:
    """Why the blocks of this forward run uncompiled, or ""."""
    if not model.plan.splits_tokens:
        return f"{model.plan.architecture} has no sequence plan, so nobody knows its blocks"
    if model.alone is not None:
        return f"the class {model.alone} has code of its own in the model's forward"
    if any(blocks.joined for blocks in model.plan.blocks):
        return f"a module in the blocks of {model.plan.title} tells something about all tokens, which the ranks join"
    if any(blocks.method != "forward" for blocks in model.plan.blocks):
        return f"{model.plan.title} calls a block's parts one by one"
    if groups.sequence.ring is not None:
        return "keys and values go round a ring (ring in SP Model Patch)"
    inside = [
        f"{place}: {model_options.name_of(value)}"
        for place, value in code_inside(model.patcher, model.modules, call.options)
        if place != OVERRIDE and not place.startswith("patches_replace.dit.")
    ]
    if inside:
        return f"code of another node runs inside the blocks ({inside[0]})"
    for path, module in model.modules.items():
        if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
            return f"the weights of {path} are patched while the model computes (a LoRA that did not fit on the device)"
        forward = vars(module).get("forward")
        if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
            return f"the forward of {path} is replaced (a LoRA beside the weights)"
    return ""


@contextlib.contextmanager
def compile_phase(context: WorkerContext, leader: int) -> Iterator[None]:
    """While a graph is compiled, everybody sees that. Ranks wait for the leader's graph, which they then find in torch's cache.

    The leader needs nobody before the next exchange, so a rank that waits for it to come there never waits for ever.

    Args:
        leader: rank of the leader; this rank itself where it waits for nobody.
    """
    state = context.own_state
    block, blocks = state.block, state.blocks
    context.show(Phase.COMPILING, block, blocks)
    try:
        if leader != context.rank:
            _wait_for(leader, context)
        yield
    finally:
        context.show(Phase.COMPUTING, block, blocks)


def _wait_for(rank: int, context: WorkerContext) -> None:
    leader, reached = context.shared_state.ranks[rank], context.own_state.collective_seq
    compiled = computed = time.monotonic()
    while leader.collective_seq <= reached:
        if context.should_abort() is not None:
            raise PeerFailed
        now = time.monotonic()
        compiled = now if leader.phase is Phase.COMPILING else compiled
        computed = now if leader.phase in (Phase.COMPILING, Phase.COMPUTING) else computed
        if now - compiled > TRACED_S or now - computed > HEARD_S:
            return
        time.sleep(0.005)
