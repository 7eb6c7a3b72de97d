"""Installs a plan into a model for one forward, and takes it out again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.sequence_group import SequenceGroup
from ..comm import Transport
from ..errors import SPError
from ..layout import FlatLayout, SequenceLayout
from .arguments import Arguments, parameter_names
from .forward_state import Escaped, ForwardState
from .override import HeldMask, mark
from .plan import Attention, Blocks, HookPoint, SequencePlan, ShardRule

#: (block, blocks in all): called before each block; may raise to stop the forward
EnterBlock = Callable[[int, int], None]
Hooked = tuple[tuple, dict[str, Any]] | None


class Engine:
    """A plan, the ranks to run it on, and who wants to know about blocks.

    Args:
        sequence: the ranks' transports; a bare transport means Ulysses over all of its ranks.
        layout: "auto" leaves it to the plan; "flat" and "tiles" are the user's word.
        inputs: the forward's arguments by name; the shape of its ``x`` tells a plan the token grid.
    """

    def __init__(
        self,
        plan: SequencePlan,
        sequence: SequenceGroup | Transport,
        enter_block: EnterBlock | None = None,
        *,
        layout: str = "auto",
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan = plan
        self.sequence = SequenceGroup.flat(sequence) if isinstance(sequence, Transport) else sequence
        self._enter_block = enter_block or (lambda block, blocks: None)
        self._wanted, self._inputs = layout, inputs or {}

    @contextlib.contextmanager
    def installed(self, model: nn.Module) -> Iterator[ForwardState]:
        """Hooks are in ``model`` inside this context; nothing of them is left after it."""
        run = ForwardState(self.sequence.rank, self.sequence.world_size)
        modules = [(blocks, block) for blocks in self.plan.blocks for block in blocks.of(model)]
        with contextlib.ExitStack() as undo:
            for index, (blocks, block) in enumerate(modules):
                self._hook_block(model, blocks, block, index, len(modules), run, undo)
            for site in self.plan.sites:
                self._hook_site(model, site, run, undo)
            yield run

    def adapted(self, options: dict[str, Any], run: ForwardState) -> dict[str, Any]:
        """Transformer options whose patches between blocks see the whole sequence: its tokens are gathered for them."""
        patches = options.get("patches") or {}
        whole = {kind: [self._whole(patch, run) for patch in patches[kind]] for kind in self.plan.between if kind in patches}
        return {**options, "patches": {**patches, **whole}} if whole else options

    def _whole(self, patch: Callable[[dict[str, Any]], dict[str, Any]], run: ForwardState) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def between(args: dict[str, Any]) -> dict[str, Any]:
            if not run.split:
                return patch(args)
            out = patch({**args, "img": self._all_tokens(args["img"], run)})
            return {**out, "img": run.shard(out["img"])}

        return between

    # -- blocks ----------------------------------------------------------------------

    def _hook_block(
        self, model: nn.Module, blocks: Blocks, block: nn.Module, index: int, count: int, run: ForwardState, undo: contextlib.ExitStack
    ) -> None:
        plan = self.plan
        names = parameter_names(type(block).forward)

        def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Hooked:
            self._enter_block(index, count)
            call = Arguments(names, args, kwargs)
            stream = call.get(blocks.stream)
            tokens = stream if blocks.stream_item is None else stream[blocks.stream_item]
            first = not run.decided
            if first:
                run.start(self._layout(model, call, tokens.size(blocks.dim)))
                self._cut_residuals(run)
            if not run.split:
                return None
            if blocks.whole is not None:
                run.whole_tokens = call.get(blocks.whole).size(1)
            if first or (blocks.enters and tokens.size(blocks.dim) == run.layout.tokens):
                tokens = run.shard(tokens, blocks.dim)
            else:
                run.expect_local(tokens, blocks.dim, run.whole_tokens if blocks.joined else 0)
            if blocks.stream_item is not None:
                tokens = type(stream)(tokens if i == blocks.stream_item else x for i, x in enumerate(stream))
            call.set(blocks.stream, tokens)
            self._cut(call, blocks.cuts, run)
            run.attended = 0
            return tuple(call.args), call.kwargs

        def after(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
            if not run.split:
                return None
            options = Arguments(names, args, kwargs).get("transformer_options") or {}
            expected = any(not attention.skipped(options) for attention in blocks.attentions if attention.kind != "from_stream")
            if expected and not plan.idle(options) and not run.attended:
                raise Escaped(f"Block {index}")
            if index == count - 1 and plan.gather_early(self._inputs):
                whole = run.whole_tokens if blocks.joined else 0
                gathered = self._gather(output.narrow(blocks.dim, whole, output.size(blocks.dim) - whole), run)
                return torch.cat([output.narrow(blocks.dim, 0, whole), gathered], blocks.dim)
            return None

        undo.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        for attention in blocks.attentions:
            where = f"{attention.module or 'attention'} of block {index}"
            self._hook_attention(block.get_submodule(attention.module), attention, where, run, undo)
        undo.callback(block.register_forward_hook(after, with_kwargs=True).remove)

    def _layout(self, model: nn.Module, call: Arguments, tokens: int) -> SequenceLayout:
        plan, world_size = self.plan, self.sequence.world_size
        flat = FlatLayout(tokens, world_size)
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
        # a grid can be too small for as many tiles as ranks where its tokens are still enough for all
        return flat if 0 in layout.counts and not plan.only_tiles else layout

    def _hook_attention(self, module: nn.Module, attention: Attention, where: str, run: ForwardState, undo: contextlib.ExitStack) -> None:
        names = parameter_names(type(module).forward)
        attended: list[int] = []

        def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Hooked:
            if not run.split:
                return None
            call = Arguments(names, args, kwargs)
            mask = call.get(attention.mask_parameter)
            if attention.mask_attention is not None and mask is not None and not isinstance(mask, Tensor):
                call.set(attention.mask_parameter, HeldMask(mask, attention.mask_attention(module), attention.mask_in_raster))
            options = call.get("transformer_options") or {}
            call.set("transformer_options", mark(options, run, self.sequence, attention.kind))
            attended.append(run.attended)
            return tuple(call.args), call.kwargs

        def after(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if not run.split:
                return
            options = Arguments(names, args, kwargs).get("transformer_options") or {}
            if run.attended == attended.pop() and not attention.skipped(options):
                raise Escaped(where)

        undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    # -- outside the blocks ------------------------------------------------------------

    def _hook_site(self, model: nn.Module, site: HookPoint, run: ForwardState, undo: contextlib.ExitStack) -> None:
        parent_path, _, name = site.path.rpartition(".")
        parent = model.get_submodule(parent_path)
        target = getattr(parent, name)
        if isinstance(target, nn.Module):
            self._hook_module(target, site, run, undo)
        else:
            self._wrap_method(parent, name, target, site, run, undo)

    def _hook_module(self, module: nn.Module, site: HookPoint, run: ForwardState, undo: contextlib.ExitStack) -> None:
        names = parameter_names(type(module).forward)
        called: list[dict[str, Any]] = []

        def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Hooked:
            if not run.split:
                return None
            call = Arguments(names, args, kwargs)
            called.append(call.by_name())
            self._cut(call, site.cuts, run)
            return tuple(call.args), call.kwargs

        def after(_: nn.Module, args: tuple, output: Any) -> Any:
            if not run.split:
                return output
            arguments = called.pop()
            if callable(site.gather):
                output = site.gather(output, arguments, run, self.sequence.all_ranks)
                run.gathered = True
                return output
            return self._gather(output, run) if site.gather else output

        undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(after).remove)

    def _wrap_method(
        self, owner: nn.Module, name: str, method: Callable[..., Any], site: HookPoint, run: ForwardState, undo: contextlib.ExitStack
    ) -> None:
        if site.gather:
            raise SPError(f"the plan of {self.plan.architecture} gathers at {site.path}, which is not a module")
        names = parameter_names(getattr(type(owner), name))
        had = owner.__dict__.get(name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not run.split:
                return method(*args, **kwargs)
            call = Arguments(names, args, kwargs)
            self._cut(call, site.cuts, run)
            return method(*call.args, **call.kwargs)

        owner.__dict__[name] = wrapped
        undo.callback(
            owner.__dict__.pop if had is None else functools.partial(owner.__dict__.__setitem__, name),
            *((name, None) if had is None else (had,)),
        )

    def _cut(self, call: Arguments, cuts: Mapping[str, ShardRule], run: ForwardState) -> None:
        for name, rule in cuts.items():
            value = call.get(name)
            if value is None:
                continue
            try:
                call.set(name, run.cut(value, rule))
            except (ValueError, IndexError) as error:
                raise SPError(f"{self.plan.architecture}: '{name}' does not fit the {run.layout.tokens} tokens: {error}") from error

    def _cut_residuals(self, run: ForwardState) -> None:
        """In place, as the model has these arguments in its hands already."""
        if not run.split:
            return
        for name in self.plan.residuals:
            for kind, tensors in (self._inputs.get(name) or {}).items():
                try:
                    tensors[:] = [None if x is None else run.shard(x) for x in tensors]
                except ValueError as error:
                    raise SPError(
                        f"{self.plan.architecture}: the residuals of a ControlNet ({name}, {kind}) do not fit: {error}"
                    ) from error

    def _gather(self, output_BtC: Tensor, run: ForwardState) -> Tensor:
        gathered = self._all_tokens(output_BtC, run)
        run.gathered = True
        return gathered

    def _all_tokens(self, tokens_BtC: Tensor, run: ForwardState) -> Tensor:
        run.expect_local(tokens_BtC)
        return run.layout.restore(self.sequence.all_ranks.all_gather_tokens(tokens_BtC.contiguous(), run.layout.counts), 1)
