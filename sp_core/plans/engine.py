"""Installs a plan into a model for one forward, and takes it out again."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..attention.parallel import SequenceGroup
from ..comm import Transport
from ..errors import SPError
from ..layout import FlatLayout, SequenceLayout
from .override import HeldMask, mark
from .plan import Attention, Cut, SequencePlan, Site
from .run import Escaped, Run

#: (block, blocks in all): called before each block; may raise to stop the forward
EnterBlock = Callable[[int, int], None]


class Arguments:
    """A call's arguments by parameter name, changed in place of their position."""

    def __init__(self, names: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._names, self.args, self.kwargs = names, list(args), dict(kwargs)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        at = self._names.index(name) if name in self._names else len(self.args)
        return self.args[at] if at < len(self.args) else default

    def set(self, name: str, value: Any) -> None:
        at = self._names.index(name) if name in self._names else len(self.args)
        if name not in self.kwargs and at < len(self.args):
            self.args[at] = value
        else:
            self.kwargs[name] = value

    def by_name(self) -> dict[str, Any]:
        return {**dict(zip(self._names, self.args, strict=False)), **self.kwargs}


@functools.lru_cache(maxsize=256)
def _parameter_names(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


class Engine:
    """A plan, the ranks to run it on, and who wants to know about blocks.

    Args:
        sequence: the ranks' transports; a bare transport means Ulysses over all of its ranks.
        layout: "auto" leaves it to the plan; "flat" and "tiles" are the user's word.
        model_input: the forward's ``x``, whose shape tells a plan the token grid.
    """

    def __init__(
        self,
        plan: SequencePlan,
        sequence: SequenceGroup | Transport,
        enter_block: EnterBlock | None = None,
        *,
        layout: str = "auto",
        model_input: Any = None,
    ) -> None:
        self.plan = plan
        self.sequence = SequenceGroup.flat(sequence) if isinstance(sequence, Transport) else sequence
        self._enter_block = enter_block or (lambda block, blocks: None)
        self._wanted, self._input = layout, model_input

    @contextlib.contextmanager
    def installed(self, model: nn.Module) -> Iterator[Run]:
        """Hooks are in ``model`` inside this context; nothing of them is left after it."""
        run = Run(self.sequence.rank, self.sequence.world_size)
        with contextlib.ExitStack() as undo:
            blocks = self.plan.blocks_of(model)
            for index, block in enumerate(blocks):
                self._hook_block(model, block, index, len(blocks), run, undo)
            for site in self.plan.sites:
                self._hook_site(model, site, run, undo)
            yield run

    # -- blocks ----------------------------------------------------------------------

    def _hook_block(self, model: nn.Module, block: nn.Module, index: int, blocks: int, run: Run, undo: contextlib.ExitStack) -> None:
        plan = self.plan
        names = _parameter_names(type(block).forward)

        def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
            self._enter_block(index, blocks)
            call = Arguments(names, args, kwargs)
            stream = call.get(plan.stream)
            tokens = stream if plan.stream_item is None else stream[plan.stream_item]
            first = not run.decided
            if first:
                run.start(self._layout(model, call, tokens))
            if not run.started:
                return None
            tokens = run.layout.shard(tokens, run.rank, 1) if first else run.local_stream(tokens)
            if plan.stream_item is not None:
                tokens = type(stream)(tokens if i == plan.stream_item else x for i, x in enumerate(stream))
            call.set(plan.stream, tokens)
            self._cut(call, plan.cuts, run)
            run.attended = 0
            return tuple(call.args), call.kwargs

        def after(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if not run.started:
                return
            options = Arguments(names, args, kwargs).get("transformer_options") or {}
            expected = any(not attention.skipped(options) for attention in plan.attentions if attention.kind == "self")
            if expected and not plan.idle(options) and not run.attended:
                raise Escaped(f"Block {index}")

        undo.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(block.register_forward_hook(after, with_kwargs=True).remove)
        for attention in plan.attentions:
            self._hook_attention(block.get_submodule(attention.module), attention, f"{attention.module} of block {index}", run, undo)

    def _layout(self, model: nn.Module, call: Arguments, tokens_BTC: Tensor) -> SequenceLayout:
        world_size, flat = self.sequence.world_size, FlatLayout(tokens_BTC.size(1), self.sequence.world_size)
        if self._wanted == "flat":
            return flat
        arguments = {**call.by_name(), "input": self._input}
        choose = self.plan.tiles if self._wanted == "tiles" else self.plan.choose_layout
        if choose is None:
            raise SPError(f"{self.plan.architecture} has no tile layout; leave the layout of SP Model Patch at auto or flat")
        layout = choose(model, arguments, tokens_BTC, world_size)
        # a grid can be too small for as many tiles as ranks where its tokens are still enough for all
        return flat if 0 in layout.counts else layout

    def _hook_attention(self, module: nn.Module, attention: Attention, where: str, run: Run, undo: contextlib.ExitStack) -> None:
        names = _parameter_names(type(module).forward)
        attended: list[int] = []

        def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
            if not run.started:
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
            if not run.started:
                return
            options = Arguments(names, args, kwargs).get("transformer_options") or {}
            if run.attended == attended.pop() and not attention.skipped(options):
                raise Escaped(where)

        undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    # -- behind the blocks -------------------------------------------------------------

    def _hook_site(self, model: nn.Module, site: Site, run: Run, undo: contextlib.ExitStack) -> None:
        parent_path, _, name = site.path.rpartition(".")
        parent = model.get_submodule(parent_path)
        target = getattr(parent, name)
        if isinstance(target, nn.Module):
            self._hook_module(target, site, run, undo)
        else:
            self._wrap_method(parent, name, target, site, run, undo)

    def _hook_module(self, module: nn.Module, site: Site, run: Run, undo: contextlib.ExitStack) -> None:
        names = _parameter_names(type(module).forward)

        def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
            if not run.started:
                return None
            call = Arguments(names, args, kwargs)
            self._cut(call, site.cuts, run)
            return tuple(call.args), call.kwargs

        def after(_: nn.Module, args: tuple, output: Tensor) -> Tensor:
            return self._gather(output, run) if run.started else output

        undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        if site.gather:
            undo.callback(module.register_forward_hook(after).remove)

    def _wrap_method(
        self, owner: nn.Module, name: str, method: Callable[..., Any], site: Site, run: Run, undo: contextlib.ExitStack
    ) -> None:
        if site.gather:
            raise SPError(f"the plan of {self.plan.architecture} gathers at {site.path}, which is not a module")
        names = _parameter_names(getattr(type(owner), name))
        had = owner.__dict__.get(name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not run.started:
                return method(*args, **kwargs)
            call = Arguments(names, args, kwargs)
            self._cut(call, site.cuts, run)
            return method(*call.args, **call.kwargs)

        owner.__dict__[name] = wrapped
        undo.callback(
            owner.__dict__.pop if had is None else functools.partial(owner.__dict__.__setitem__, name),
            *((name, None) if had is None else (had,)),
        )

    def _cut(self, call: Arguments, cuts: Mapping[str, Cut], run: Run) -> None:
        for name, rule in cuts.items():
            value = call.get(name)
            if value is None:
                continue
            try:
                call.set(name, run.cut(value, rule))
            except (ValueError, IndexError) as error:
                raise SPError(f"{self.plan.architecture}: '{name}' does not fit the {run.layout.tokens} tokens: {error}") from error

    def _gather(self, output_BtC: Tensor, run: Run) -> Tensor:
        gathered = self.sequence.whole.all_gather_tokens(output_BtC.contiguous(), run.layout.counts)
        run.gathered = True
        return run.layout.restore(gathered, 1)
