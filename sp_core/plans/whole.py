"""Runs code of other packs on whole data: all tokens go in, and of what comes out a rank keeps its own.

Every rank computes the same, so the result is right whatever the code does, and no faster than on one device.

Shape legend: B batch, N replicated tokens, t this rank's tokens, T all tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention.sequence_group import SequenceGroup
from .forward_state import ForwardState
from .host_functions import HostFunctions
from .override import OVERRIDE, ExchangedAttention, HeldMask, WholeOverride
from .plan import Blocks
from .probing import Site
from .probing.options import each_options, tell_back

#: numbers of a tensor that ranks compare to see whether they hold the same one
_SAMPLES = 32
#: relative L2 distance of two ranks' samples from which on they are of different tokens; closer than that is rounding
_SAME = 1e-2
#: a dict with one of these is transformer options
_OPTIONS = {"cond_or_uncond", "block_index", "total_blocks", "img_slice", "sample_sigmas", OVERRIDE}


@dataclass(frozen=True)
class Foreign:
    """Code of other packs inside one model that nobody knows to keep tokens and heads apart."""

    #: path of a module below the model -> name of the code that replaces it, or its forward
    modules: Mapping[str, str] = field(default_factory=dict)
    #: (place, function) of an entry of the options -> its name; None where it keeps tokens and heads apart
    name: Callable[[str, Any], str | None] = lambda place, function: None
    #: there is code beside this that is taken to keep everything apart, whatever it does; for tests
    trusted: bool = False


class WholeData:
    """Whole data for code of other packs during one forward. All its calls are collective over the sequence's ranks."""

    def __init__(self, state: ForwardState, sequence: SequenceGroup, host: HostFunctions) -> None:
        self.state, self.sequence, self._host = state, sequence, host

    @contextlib.contextmanager
    def _computing(self, whole: bool) -> Iterator[None]:
        before, self.state.whole = self.state.whole, whole
        try:
            yield
        finally:
            self.state.whole = before

    # -- functions and forwards ----------------------------------------------------------

    def wrapped(
        self, function: Callable[..., Any], name: str, dim: int = 1, item: int | None = None, place: str | None = None
    ) -> Callable[..., Any]:
        """``function`` on all tokens, returning this rank's.

        Args:
            name: of the code, for the report.
            dim: where tokens are looked for first.
            item: which item of a tuple that comes out has tokens; None where all of those have that are long enough.
            place: where the function sits, if it is to be probed; None where it needs all tokens in any case.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(function, name, args, kwargs, (dim, dim), item, place)

        return call

    def override(self, function: Callable[..., Any], name: str) -> WholeOverride:
        """An attention override. Where the call exchanges, it gets all heads; elsewhere its queries may be this rank's tokens."""

        def call(*args: Any, **kwargs: Any) -> Any:
            dims = (2 if kwargs.get("skip_reshape") else 1, 2 if kwargs.get("skip_output_reshape") else 1)
            return self.call(function, name, args, kwargs, dims, place=OVERRIDE)

        return WholeOverride(function, name, call)

    def call(
        self,
        function: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: tuple[int, int] = (1, 1),
        item: int | None = None,
        place: str | None = None,
    ) -> Any:
        """One call. ``dims``: where tokens are looked for first in what goes in, and in what comes out."""
        state = self.state
        if not state.split or state.whole:
            return function(*args, **kwargs)
        site = None if place is None or state.probing is None else state.probing.site(place, name)
        if site is not None and site.apart:
            state.note_apart(name)
            with self._computing(whole=True):
                return site.shared(function, _options_in((args, kwargs)), lambda: function(*args, **kwargs))
        widening = _Widening(self, dims[0], (args, kwargs))
        if not widening.streams:
            return function(*args, **kwargs)

        def own(output: Any) -> Any:
            if item is not None and isinstance(output, (tuple, list)):
                return type(output)(self._own(x, dims[1], widening.replicated) if i == item else x for i, x in enumerate(output))
            return self._own(output, dims[1], widening.replicated)

        if site is not None and site.unprobed:
            return self._probed(site, function, (args, kwargs), widening, own)
        state.note_whole(name, "" if site is None else site.why_whole)
        whole_args, whole_kwargs = widening.widen((args, kwargs))
        with self._computing(whole=True):
            output = own(function(*whole_args, **whole_kwargs))
        widening.tell_back()
        return output

    def _probed(self, site: Site, function: Callable[..., Any], given: Any, widening: _Widening, own: Callable[[Any], Any]) -> Any:
        """The first call of a function: on whole data, then with NaN for other ranks' tokens, then on this rank's tokens."""
        probe = site.probing.probe(site, function, _options_in(given))
        watched: list[tuple[dict[str, Any], dict[str, Any]]] = []

        def watch(options: dict[str, Any]) -> dict[str, Any]:
            watched.append((options, probe.watched(options)))
            return watched[-1][1]

        def called(arguments: Any) -> Callable[[], Any]:
            args, kwargs = each_options(arguments, _is_options, watch)
            return lambda: function(*map(probe.trusted, args), **kwargs)

        with self._computing(whole=True):
            output = own(probe.whole(called(widening.widen(given))))
            for options, copied in watched:
                tell_back(dict(options), copied, options)
            widening.tell_back()
            probe.require(widening.floating, "its tokens are whole numbers")
            if probe.open:
                poisoned = own(probe.again(called(widening.widen(given, poisoned=True))))
                probe.compare(poisoned, output, "it mixes tokens")
            share = probe.again(called(given))
            probe.compare(share, output, "it treats a part of the tokens otherwise than all of them")
        self.state.note_verdict(site.probing.conclude(site, probe))
        return output

    def _own(self, output: Any, dim: int, replicated: int) -> Any:
        """This rank's tokens of everything that has all of them, behind ``replicated`` tokens."""
        if isinstance(output, (tuple, list)):
            return type(output)(self._own(x, dim, replicated) for x in output)
        if isinstance(output, dict):
            return {key: self._own(x, dim, replicated) for key, x in output.items()}
        if not isinstance(output, Tensor):
            return output
        for count in dict.fromkeys((replicated, 0)):
            at = _dim_of(output, dim, count + self.state.layout.tokens)
            if at is not None:
                return self.shard(output, at, count)
        return output

    def shard(self, tokens: Tensor, dim: int = 1, replicated: int = 0) -> Tensor:
        """Of N + T tokens on ``dim``, the N and this rank's t."""
        if not replicated:
            return self.state.shard(tokens, dim)
        text, stream = self.state.parted(tokens, dim, replicated)
        return self.state.together(text, self.state.shard(stream, dim), dim)

    def gather(self, tokens: Tensor, dim: int = 1, replicated: int = 0) -> Tensor:
        """Of the N replicated and this rank's t tokens on ``dim``, all T in the model's order beside the N."""
        text, own = self.state.parted(tokens, dim, replicated)
        self.state.expect_local(own, dim)
        first = own.movedim(dim, 0).unsqueeze(0).contiguous()
        layout = self.state.layout
        gathered = layout.restore(self.sequence.all_ranks.all_gather_tokens(first, layout.counts), 1)
        whole = gathered.squeeze(0).movedim(0, dim)
        return self.state.together(text, whole, dim) if replicated else whole.contiguous()

    # -- blocks --------------------------------------------------------------------------

    def block(self, function: Callable[..., Any], name: str, blocks: Blocks) -> Callable[..., Any]:
        """A replacement of a block: it gets all tokens, while the ``original_block`` that it calls computes shared out."""
        state = self.state

        def replaced(args: dict[str, Any], extra: dict[str, Any]) -> Any:
            if state.gathered or state.whole:
                return function(args, extra)
            key = "img" if "img" in args else "x"
            original = extra["original_block"]

            def shared(inner: dict[str, Any]) -> Any:
                # a function that swapped the host's attention means the whole block
                if self._host.is_swapped():
                    return original(inner)
                given = self._of_stream(inner[key], blocks, self.shard) if state.split else inner[key]
                with self._computing(whole=False):
                    out = original({**inner, key: given})
                return {**out, key: self._gathered(out[key], given, inner[key], blocks)} if state.split else out

            if state.split:
                args = {**args, key: self._of_stream(args[key], blocks, self.gather)}
            state.note_whole(name)
            with self._computing(whole=True):
                out = function(args, {**extra, "original_block": shared})
            return {**out, key: self._of_stream(out[key], blocks, self.shard)} if state.split else out

        return replaced

    def _of_stream(self, stream: Any, blocks: Blocks, change: Callable[[Tensor, int, int], Tensor]) -> Any:
        replicated = self.state.replicated_tokens if blocks.replicated is not None and blocks.replicated.in_stream else 0
        if blocks.stream_item is None:
            return change(stream, blocks.dim, replicated)
        return type(stream)(change(x, blocks.dim, replicated) if i == blocks.stream_item else x for i, x in enumerate(stream))

    def _gathered(self, output: Any, given: Any, before: Any, blocks: Blocks) -> Any:
        """A block's output, all tokens. A block that computes in place changes what its caller holds, so this does too."""
        whole = self._of_stream(output, blocks, self.gather)
        item = blocks.stream_item
        if item is None:
            return before.copy_(whole) if output is given and before.shape == whole.shape else whole
        if output[item] is given[item] and before[item].shape == whole[item].shape:
            return type(whole)(before[i].copy_(x) if i == item else x for i, x in enumerate(whole))
        return whole


class _Widening:
    """Which arguments of one call are this rank's tokens, and all tokens in their place. Collective."""

    def __init__(self, whole: WholeData, dim: int, arguments: Any) -> None:
        self._whole, self._dim, self._state = whole, dim, whole.state
        self._made: dict[int, Any] = {}
        #: options as they came, and their copy before and behind the call
        self._copies: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        #: replicated tokens that some stream has beside its own
        self.replicated = 0
        #: id of a tensor -> (dim of its tokens, replicated tokens before them)
        self._places: dict[int, tuple[int, int]] = {}
        self._tensors: list[Tensor] = []
        self._collect(arguments)
        self._agree()
        #: there is something that only this rank has
        self.streams = bool(self._places)

    def _collect(self, value: Any) -> None:
        if self._state.original(value) is not value or _is_options(value):
            return
        if isinstance(value, Tensor) and value.dim() > 1:
            if all(value is not tensor for tensor in self._tensors):
                self._tensors.append(value)
        elif isinstance(value, (tuple, list)):
            for x in value:
                self._collect(x)
        elif isinstance(value, dict):
            for x in value.values():
                self._collect(x)

    def _agree(self) -> None:
        """A tensor is a stream if each rank's has as many tokens as the rank owns, and the ranks' are not the same."""
        if not self._tensors:
            return
        state, layout = self._state, self._state.layout
        own = layout.counts[state.rank]
        device = next((tensor.device for tensor in self._tensors if tensor.device.type != "cpu"), torch.device("cpu"))
        rows = []
        for tensor in self._tensors:
            # first with the replicated tokens: a rank's own may be as many as the head dim
            found = next(((at, n) for n in (state.replicated_tokens, 0) if (at := _dim_of(tensor, self._dim, n + own)) is not None), None)
            if found is not None:
                self._places[id(tensor)] = found
            at, n = found if found is not None else (-1, 0)
            samples = _samples(self._stream_of(tensor, at, n)).to(device)
            rows.append(torch.cat([torch.tensor([float(at), float(n)], device=device), samples]))
        told = self._whole.sequence.all_ranks.all_gather_tokens(torch.stack(rows)[None, None], [1] * state.world_size)[0].cpu()
        for i, tensor in enumerate(self._tensors):
            of_ranks = told[:, i]
            placed = bool((of_ranks[:, :2] == of_ranks[0, :2]).all()) and of_ranks[0, 0] >= 0
            uneven = len(set(layout.counts)) > 1
            samples = of_ranks[:, 2:]
            differ = (samples - samples[0]).norm(dim=1) > _SAME * samples[0].norm()
            if not placed or not (uneven or bool(differ.any())):
                self._places.pop(id(tensor), None)
        self.replicated = max((n for _, n in self._places.values()), default=0)

    def _stream_of(self, tensor: Tensor, dim: int, replicated: int) -> Tensor:
        return self._state.parted(tensor, dim, replicated)[1] if dim >= 0 and replicated else tensor

    @property
    def floating(self) -> bool:
        """All streams can hold NaN."""
        return all(tensor.is_floating_point() for tensor in self._tensors if id(tensor) in self._places)

    def widen(self, value: Any, poisoned: bool = False) -> Any:
        """``value`` with all tokens in the place of this rank's, and whole arguments in the place of sharded ones.

        Args:
            poisoned: NaN in the place of other ranks' tokens.
        """
        original = self._state.original(value)
        if original is not value:
            return original
        if isinstance(value, HeldMask):
            return self._state.original(value.mask)
        if _is_options(value):
            return self._options(value)
        if isinstance(value, dict):
            return {key: self.widen(x, poisoned) for key, x in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.widen(x, poisoned) for x in value)
        if id(value) not in self._places:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._whole.gather(value, *self._places[id(value)])
        return self._poisoned(value) if poisoned else self._made[id(value)]

    def _poisoned(self, value: Tensor) -> Tensor:
        state, (dim, replicated) = self._state, self._places[id(value)]
        whole = torch.full_like(self._made[id(value)], torch.nan)
        kept, own = state.parted(value.movedim(dim, 0), 0, replicated)
        text, stream = state.parted(whole.movedim(dim, 0), 0, replicated)
        text.copy_(kept)
        stream[state.layout.indices(state.rank)] = own
        return whole

    def tell_back(self) -> None:
        """What the call wrote into its options is for whoever gets them next."""
        for options, before, now in self._copies:
            tell_back(before, now, options, (OVERRIDE, "img_slice"))
        self._copies.clear()

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Transformer options that say of all tokens what they said of this rank's, and whose attention exchanges nothing."""
        changed, layout = dict(options), self._state.layout
        override = options.get(OVERRIDE)
        if isinstance(override, ExchangedAttention):
            changed.pop(OVERRIDE)
            changed.update({OVERRIDE: override.users} if override.users is not None else {})
        if "img_slice" in options:
            start, stop = options["img_slice"]
            own = stop - start == layout.counts[self._state.rank]
            changed["img_slice"] = [start, start + layout.tokens] if own else [start, stop]
        self._copies.append((options, dict(changed), changed))
        return changed


def _is_options(value: Any) -> bool:
    return isinstance(value, dict) and not _OPTIONS.isdisjoint(key for key in value if isinstance(key, str))


def _options_in(value: Any) -> list[dict[str, Any]]:
    """All transformer options in a tree of arguments."""
    found: list[dict[str, Any]] = []
    each_options(value, _is_options, found.append)
    return found


def _dim_of(tensor: Tensor, first: int, size: int) -> int | None:
    """The dim with ``size`` entries: ``first`` if it has, else the first of the others."""
    dims = (first, *(dim for dim in range(1, tensor.dim()) if dim != first))
    return next((dim for dim in dims if dim < tensor.dim() and tensor.size(dim) == size), None)


def _samples(tensor: Tensor) -> Tensor:
    """Some numbers of a tensor, float32 (32,)."""
    if not tensor.numel():
        return torch.zeros(_SAMPLES, device=tensor.device)
    flat = tensor.reshape(-1)
    index = torch.linspace(0, flat.numel() - 1, _SAMPLES, dtype=torch.float64, device=tensor.device).long()
    return torch.nan_to_num(flat[index].float())
