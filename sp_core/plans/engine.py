"""Installs a plan into a model for one forward, and takes it out again.

Each forward registers its hooks anew and removes them at its end: two for each block, two for
each attention that exchanges and two for each hook point. That costs a millisecond a forward for
the 40 blocks of Wan 14B (measured on one CPU core). In return nothing of this extension is in the
model between forwards, however the last one ended, and no hook can meet the state of another forward.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..attention.sequence_group import SequenceGroup
from ..comm import Transport
from ..errors import SPError
from ..layout import FlatLayout, SequenceLayout, too_coarse
from ..weights import Gathering
from .arguments import Arguments, parameter_names
from .attention_hooks import AttentionHooks
from .compiled_blocks import CompiledBlock, Compiler
from .forward_state import DoesNotFit, Escaped, ForwardState, ShardRule
from .host_functions import HostFunctions
from .method_hooks import Hooked, hook_call, put
from .override import OVERRIDE
from .plan import Blocks, HookPoint, SequencePlan, SplitBehind
from .probing import Probing
from .stream import as_the_model_had, grid_of, in_stream, joined_by, keep_own, shard_residuals, tokens_of
from .whole import Foreign, WholeData

#: (block, blocks in all): called before each block; may raise to stop the forward
EnterBlock = Callable[[int, int], None]


@dataclass(frozen=True)
class _Target:
    """Where the hooks of one forward go: the model, the state that they share, and the list of what to undo."""

    model: nn.Module
    state: ForwardState
    undo: contextlib.ExitStack


class Engine:
    """Hooks one forward of a model so that it runs over the ranks, as a plan says.

    Args:
        sequence: the ranks' transports; a bare transport means Ulysses over all of its ranks.
        enter_block: is told when a block begins.
        layout: "auto" leaves the layout to the plan; "flat" and "tiles" are the user's word.
        inputs: the forward's arguments by name; the shape of its ``x`` tells a plan the token grid.
        host: ComfyUI's attention functions, for plans and calls that need them.
        foreign: code of other packs inside the model, which gets whole data.
        probing: probes that code, so that it is shared out where that gives the same; None where it gets whole data in any case.
        compiler: compiles the blocks; None where they run as they are.
        weights: gathers those of each block before it computes; None where every rank has all of them.
    """

    def __init__(
        self,
        plan: SequencePlan,
        sequence: SequenceGroup | Transport,
        enter_block: EnterBlock | None = None,
        *,
        layout: str = "auto",
        inputs: Mapping[str, Any] | None = None,
        host: HostFunctions | None = None,
        foreign: Foreign | None = None,
        probing: Probing | None = None,
        compiler: Compiler | None = None,
        weights: Gathering | None = None,
    ) -> None:
        self.plan = plan
        self.sequence = SequenceGroup.flat(sequence) if isinstance(sequence, Transport) else sequence
        self._enter_block = enter_block or (lambda block, blocks: None)
        self._wanted, self._inputs = layout, inputs or {}
        self._host = host or HostFunctions()
        self._attentions = AttentionHooks(self.sequence, self._host)
        self._foreign, self._probing = foreign or Foreign(), probing
        self._compiler = compiler
        self._weights = weights

    @contextlib.contextmanager
    def installed(self, model: nn.Module) -> Iterator[ForwardState]:
        """Hooks are in ``model`` inside this context; nothing of them is left after it."""
        state = ForwardState(self.sequence.rank, self.sequence.world_size)
        state.probing, state.trusts_all = self._probing, self._foreign.trusted
        modules = [(blocks, block) for blocks in self.plan.blocks for block in blocks.of(model)]
        with contextlib.ExitStack() as undo:
            target = _Target(model, state, undo)
            if self.plan.split_behind is not None:
                self._split_behind(target, self.plan.split_behind)
            for index, (blocks, block) in enumerate(modules):
                self._hook_block(target, blocks, block, index, len(modules))
            for point in self.plan.hook_points:
                self._hook_point(target, point)
            self._give_whole_data(target)
            yield state

    def _give_whole_data(self, target: _Target) -> None:
        """Replaced forwards get all tokens. Hooks run around them, as they do around the model's own."""
        whole = WholeData(target.state, self.sequence, self._host)
        attending = {
            id(block.get_submodule(attention.module))
            for blocks in self.plan.blocks
            for block in blocks.of(target.model)
            for attention in blocks.attentions
        }
        items = {id(block): blocks for blocks in self.plan.blocks for block in blocks.of(target.model)}
        for path, name in self._foreign.modules.items():
            module = target.model.get_submodule(path)
            blocks = items.get(id(module))
            item = None if blocks is None else blocks.item_of_output
            # what attends to the video's tokens cannot keep them apart, and has exchanges in it
            place = None if any(id(part) in attending for part in module.modules()) else path
            put(module, "forward", whole.wrapped(module.forward, name, self.plan.blocks[0].dim, item, place), target.undo)
            target.state.foreign.add(id(module))

    def adapted(self, options: dict[str, Any], state: ForwardState) -> dict[str, Any]:
        """Transformer options whose code of other packs sees whole data."""
        whole, name = WholeData(state, self.sequence, self._host), self._foreign.name
        adapted = dict(options)
        if "patches" in options:
            adapted["patches"] = {kind: self._patches(kind, patches, whole) for kind, patches in options["patches"].items()}
        if "patches_replace" in options:
            adapted["patches_replace"] = {
                kind: {place: self._replacement(kind, place, function, whole) for place, function in places.items()}
                for kind, places in options["patches_replace"].items()
            }
        if (override := options.get(OVERRIDE)) is not None and (known := name(OVERRIDE, override)) is not None:
            adapted[OVERRIDE] = whole.override(override, known)
        return adapted

    def _patches(self, kind: str, patches: list[Any], whole: WholeData) -> list[Any]:
        if kind in self.plan.between:
            return [self._with_all_tokens(patch, whole.state) for patch in patches]
        names = [self._foreign.name(f"patches.{kind}", patch) for patch in patches]
        return [
            patch if name is None else whole.wrapped(patch, name, self.plan.blocks[0].dim, place=f"patches.{kind}.{i}")
            for i, (patch, name) in enumerate(zip(patches, names, strict=True))
        ]

    def _replacement(self, kind: str, place: Any, function: Any, whole: WholeData) -> Any:
        where = f"patches_replace.{kind}.{place}"
        name = self._foreign.name(where, function)
        if name is None:
            return function
        if kind != "dit":
            return whole.wrapped(function, name, self.plan.blocks[0].dim, place=where)
        in_stream = [blocks for blocks in self.plan.blocks if blocks.replicated is not None and blocks.replicated.in_stream]
        single = isinstance(place, tuple) and place[0] == "single_block" and bool(in_stream)
        return whole.block(function, name, in_stream[0] if single else self.plan.blocks[0])

    def _with_all_tokens(
        self, patch: Callable[[dict[str, Any]], dict[str, Any]], state: ForwardState
    ) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def between(args: dict[str, Any]) -> dict[str, Any]:
            if not state.split:
                return patch(args)
            out = patch({**args, "img": self._all_tokens(args["img"], state)})
            return {**out, "img": state.shard(out["img"])}

        return between

    # -- blocks ----------------------------------------------------------------------

    def _hook_block(self, target: _Target, blocks: Blocks, block: nn.Module, index: int, count: int) -> None:
        state, undo = target.state, target.undo
        names = list(blocks.parameters) or parameter_names(getattr(type(block), blocks.method))
        last = block is blocks.of(target.model)[-1]

        def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Hooked:
            self._enter_block(index, count)
            if self._weights is not None:
                self._weights.enter(index)
            if state.whole:
                return None
            call = Arguments(names, args, kwargs)
            first = not state.decided
            if first:
                self._split(target.model, blocks, call, state)
            if not state.split:
                return None
            keep_own(blocks, call, state, first)
            self._shard(call, blocks.shard, state)
            state.attended = state.self_attended = 0
            return tuple(call.args), call.kwargs

        def after(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
            if self._weights is not None:
                self._weights.leave(index)
            if not state.split:
                if blocks.gathers and last:
                    state.begin_anew()
                return None
            if state.whole:
                state.gathered = index == count - 1 and self.plan.gather_early(self._inputs)
                return None
            options = Arguments(names, args, kwargs).get("transformer_options") or {}
            expected = any(not attention.skipped(options) for attention in blocks.attentions if attention.kind != "replicated_queries")
            foreign = id(block) in state.foreign or state.trusts_all
            if expected and not self.plan.skips_stream(options) and not state.self_attended and not foreign:
                raise Escaped(f"Block {index}")
            if blocks.gathers and last:
                whole = self._gather_stream(blocks, output, state)
                state.begin_anew()
                return whole
            if index == count - 1 and self.plan.gather_early(self._inputs):
                return self._gather_stream(blocks, output, state)
            return None

        hook_call(block, blocks.method, before, after, undo, functools.partial(self._hook_inside, block, blocks, index, state, undo))

    def _hook_inside(self, block: nn.Module, blocks: Blocks, index: int, state: ForwardState, undo: contextlib.ExitStack) -> None:
        where = [f"{attention.module or 'attention'} of block {index}" for attention in blocks.attentions]
        if self._compiler is None:
            self._attentions.hook(block, blocks, where, state, undo)
        else:
            # hooks at its attentions only where a call of the block is not compiled
            hook = functools.partial(self._attentions.hook, block, blocks, where, state)
            compiled = CompiledBlock(block, blocks, where, state, self.sequence, self._host, self._compiler, hook)
            put(block, "forward", compiled, undo)
        for path, join in blocks.joined.items():
            undo.callback(block.get_submodule(path).register_forward_hook(joined_by(join, self.sequence, state)).remove)

    def _split_behind(self, target: _Target, rule: SplitBehind) -> None:
        """A method of the model splits what it gives."""
        own, state, first = getattr(target.model, rule.method), target.state, self.plan.blocks[0]

        @functools.wraps(own)
        def split(*args: Any, **kwargs: Any) -> dict[str, Any]:
            call = Arguments([first.stream], (), own(*args, **kwargs))
            call.set(first.stream, call.kwargs.pop(rule.stream))
            self._split(target.model, first, call, state)
            if state.split:
                keep_own(first, call, state, True)
                self._shard(call, rule.shard, state)
            return {**call.kwargs, rule.stream: call.get(first.stream)}

        put(target.model, rule.method, split, target.undo)

    def _split(self, model: nn.Module, blocks: Blocks, call: Arguments, state: ForwardState) -> None:
        """The first block, or what the plan names before it, decides how the sequence lies over the ranks."""
        grid = grid_of(blocks, tokens_of(blocks, call))
        state.split_by(self._layout(model, call, math.prod(grid)))
        state.grid = grid
        if state.split:
            shard_residuals(self.plan, self._inputs, state)

    def _gather_stream(self, blocks: Blocks, output: Any, state: ForwardState) -> Any:
        """A block's output with all ranks' tokens, beside the replicated tokens that it may have."""
        item = blocks.item_of_output
        if item is not None:
            return type(output)(self._gather_tokens(blocks, x, state) if i == item else x for i, x in enumerate(output))
        return self._gather_tokens(blocks, output, state)

    def _gather_tokens(self, blocks: Blocks, tokens: Tensor, state: ForwardState) -> Tensor:
        count, dim = in_stream(blocks, state), blocks.dim
        replicated, own = state.parted(tokens, dim, count)
        # tokens to dim 1, behind a batch or what stands for it
        gathered = self._gather(own if dim == 1 else own.movedim(dim, 0)[None], state)
        whole = as_the_model_had(gathered if dim == 1 else gathered[0].movedim(0, dim), dim, state.grid)
        return state.together(replicated, whole, dim)

    def _layout(self, model: nn.Module, call: Arguments, tokens: int) -> SequenceLayout:
        plan, world_size = self.plan, self.sequence.world_size
        weights = self.sequence.token_weights
        flat = FlatLayout(tokens, world_size, weights)
        if self._wanted == "flat" and not plan.only_tiles:
            return flat
        arguments = {**call.by_name(), "input": self._inputs.get("x")}
        choose = plan.tiles if self._wanted == "tiles" else plan.choose_layout
        if choose is None or self._wanted == "flat":
            raise SPError(
                f"{plan.architecture} has no {self._wanted} layout; leave the layout of SP Model Patch at auto"
                + ("" if plan.only_tiles else " or flat")
            )
        layout = choose(model, arguments, tokens, world_size)
        if weights is not None:
            layout = layout.weighted(weights)
            if self._wanted == "auto" and not plan.only_tiles and too_coarse(layout, flat, weights):
                return flat
        # a grid can be too small for as many tiles as ranks where its tokens are still enough for all
        return flat if 0 in layout.counts and not plan.only_tiles else layout

    # -- outside the blocks ------------------------------------------------------------

    def _hook_point(self, target: _Target, point: HookPoint) -> None:
        parent_path, _, name = point.path.rpartition(".")
        parent = target.model.get_submodule(parent_path)
        found = getattr(parent, name)
        if isinstance(found, nn.Module):
            self._hook_module(found, point, target)
        else:
            self._wrap_method(parent, name, found, point, target)

    def _hook_module(self, module: nn.Module, point: HookPoint, target: _Target) -> None:
        state, undo = target.state, target.undo
        names = parameter_names(type(module).forward)
        called: list[dict[str, Any]] = []

        def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Hooked:
            if not state.split:
                return None
            call = Arguments(names, args, kwargs)
            called.append(call.by_name())
            self._shard(call, point.shard, state)
            return tuple(call.args), call.kwargs

        def after(_: nn.Module, args: tuple, output: Any) -> Any:
            if not state.split:
                return output
            arguments = called.pop()
            if callable(point.gather):
                output = point.gather(output, arguments, state, self.sequence.all_ranks)
                state.gathered = True
                return output
            return as_the_model_had(self._gather(output, state), 1, state.grid) if point.gather else output

        undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(after).remove)

    def _wrap_method(self, owner: nn.Module, name: str, method: Callable[..., Any], point: HookPoint, target: _Target) -> None:
        state, names = target.state, parameter_names(getattr(type(owner), name))

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not state.split:
                return method(*args, **kwargs)
            call = Arguments(names, args, kwargs)
            self._shard(call, point.shard, state)
            return method(*call.args, **call.kwargs)

        put(owner, name, wrapped, target.undo)

    def _shard(self, call: Arguments, rules: Mapping[str, ShardRule], state: ForwardState) -> None:
        for name, rule in rules.items():
            value = call.get(name)
            if value is None:
                continue
            try:
                call.set(name, state.apply(rule, value))
            except (ValueError, IndexError) as error:  # of all tokens, so it is one on every rank
                raise DoesNotFit(self.plan.architecture, name, state.layout.tokens, error) from error

    def _gather(self, output_BtC: Tensor, state: ForwardState) -> Tensor:
        gathered = self._all_tokens(output_BtC, state)
        state.gathered = True
        return gathered

    def _all_tokens(self, tokens_BtC: Tensor, state: ForwardState) -> Tensor:
        """All ranks' tokens in raster order, (B, T, C)."""
        state.expect_local(tokens_BtC)
        return state.layout.restore(self.sequence.all_ranks.all_gather_tokens(tokens_BtC.contiguous(), state.layout.counts), 1)
