"""Batch rows of a forward whose tokens are not split: which rank computes which, and what of a call belongs to them. Pure functions.

A batch row is one latent with one conditioning. A model gets them as dim 0 of its tensors: the latents of the first conditioning,
then those of the next. Where it is not plain what belongs to which row, the rows stay together.

Shape legend: B all batch rows, L the latents of each conditioning.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...layout import shard_sizes
from ...plans.probing.parts import agree
from ..block_skips import SKIPPED
from ..options import INSIDE_THE_MODEL, MODEL_SAMPLING, WINDOW
from .cfg_split import PER_CONDITIONING, rows_of_tensors
from .forward_call import ForwardCall

#: options that are the same for all rows, or that no model reads
_OF_ALL_ROWS = ("sample_sigmas", "rope_options", MODEL_SAMPLING, SKIPPED, *INSIDE_THE_MODEL)
#: the option with one sigma for each latent, (L,)
_SIGMAS = "sigmas"
_PLAIN = (type(None), bool, int, float, complex, str)


@dataclass(frozen=True)
class RowChoice:
    """Who computes which batch rows of a forward: ``counts`` rows each, in the order of the ranks; ``devices`` there are.

    ``why``: the reason for which one rank computes all, in words that follow "... can be shared out"; "" where several do.
    ``unsplit``: why tokens are not split although there is a plan, in words that follow "tokens are not split "; "" without a plan.
    """

    architecture: str
    counts: tuple[int, ...]
    devices: int
    why: str = ""
    unsplit: str = ""

    def line(self, transport: str) -> str:
        """For people: "2 devices: batch rows 1 + 1, nccl; UNetModel has no sequence plan, so ..."."""
        idle = self.devices - len(self.counts)
        beside = f", {idle} idle" if idle else ""
        if len(self.counts) == 1:
            return f"{self.devices} devices: one computes all{beside}; {self.without_plan}, {self.why}"
        return f"{self.devices} devices: batch rows {' + '.join(map(str, self.counts))}{beside}, {transport}; {self.without_plan}"

    @property
    def line_of_proof(self) -> str:
        """For people: a forward that every rank computes whole."""
        shared = f"each computes all, to see whether {' + '.join(map(str, self.counts))} batch rows come out the same"
        return f"{self.devices} devices: {shared}; {self.without_plan}"

    @property
    def without_plan(self) -> str:
        if self.unsplit:
            return f"{self.architecture}'s tokens are not split {self.unsplit}, so only whole batch rows can be shared out"
        return f"{self.architecture} has no sequence plan, so only whole batch rows can be shared out"


@dataclass
class RowProofs:
    """What was found out about one loaded model, by the signature of forwards. Equal on all ranks that share one."""

    #: "": its rows come out the same alone. Else why they stay together
    found: dict[Hashable, str] = field(default_factory=dict)
    #: how often the model was looked at that kept something
    tries: dict[Hashable, int] = field(default_factory=dict)


def row_counts(rows: int, world_size: int) -> tuple[int, ...]:
    """How many rows each rank computes that computes any."""
    return shard_sizes(rows, min(rows, world_size))


def why_together(call: ForwardCall, options: Mapping[str, Any], counts: tuple[int, ...]) -> str:
    """Why the rows of a call cannot be shared out by ``counts``, in words that follow "... can be shared out, "; "" where they can.

    Args:
        options: all transformer options of this forward.
    """
    rows = call.x.size(0)
    if rows == 1:
        return "and this forward has one"
    for name, value in (*call.named.items(), *call.extra.items()):
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.size(0) not in (1, rows):
                return f"but this forward has {rows} of them and {tensor.size(0)} entries of {name}"
    conditionings = _conditionings(options)
    if rows % conditionings:
        return f"but this forward has {rows} of them for {conditionings} conditionings"
    for key, value in options.items():
        if not _fits(key, value, rows, conditionings):
            return f"but transformer_options['{key}'] may hold something of each"
    if _per_row(rows // conditionings, counts) and not _all_equal(options.get(_SIGMAS)):
        return "but the latents of this forward are at different sigmas"
    return ""


def rows_of_call(call: ForwardCall, first: int, count: int) -> ForwardCall:
    """The arguments of some of the rows, and those that have no rows."""
    rows = call.x.size(0)
    named, extra = (rows_of_tensors(tree, rows, first, count) for tree in (call.named, call.extra))
    return replace(call, named=named, extra=extra)


def rows_of_options(options: Mapping[str, Any], rows: int, first: int, count: int) -> dict[str, Any]:
    """The transformer options of some of ``rows`` rows.

    Models take the rows apart by the number of conditionings. So each conditioning is named once where all have equally many of
    these rows, and once a row where they have not.
    """
    own = dict(options)
    conditionings = _conditionings(options)
    latents = rows // conditionings
    picked = [row // latents for row in range(first, first + count)]
    if not _crosses(latents, first, count):
        picked = sorted(set(picked))
    for key in PER_CONDITIONING:
        if isinstance(own.get(key), list):
            own[key] = [own[key][number] for number in picked]
    sigmas = own.get(_SIGMAS)
    if isinstance(sigmas, Tensor) and sigmas.dim() and sigmas.size(0) == latents > 1:
        if _crosses(latents, first, count):
            own[_SIGMAS] = sigmas[:1]
        elif count < latents:
            own[_SIGMAS] = sigmas.narrow(0, first % latents, count)
    return own


def with_other_rows(call: ForwardCall, first: int, count: int) -> ForwardCall:
    """A copy of the call in which all rows but ``count`` from ``first`` on are others."""
    rows = call.x.size(0)

    def other(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        if tensor.dim() and tensor.size(0) == rows:
            # timesteps and numbers of a row stay such; what is larger is data
            row = -0.5 * tensor[first] if tensor.dim() > 2 and tensor.is_floating_point() else tensor[first]
            changed[:first], changed[first + count :] = row, row
        return changed

    named, extra = (tree_map_only(Tensor, other, tree) for tree in (call.named, call.extra))
    return replace(call, named=named, extra=extra)


def same_bits(mine: Any, theirs: Any) -> bool:
    """Two outputs are equal, tensor by tensor."""
    pairs = list(zip(tree_leaves(mine), tree_leaves(theirs), strict=True))
    return all(not isinstance(a, Tensor) or torch.equal(a, b) for a, b in pairs)


def rows_agree(mine: Any, theirs: Any, rows: int) -> bool:
    """Two outputs are the same but for rounding, in each of their rows."""
    return all(agree(rows_of_tensors(mine, rows, row, 1), rows_of_tensors(theirs, rows, row, 1)) for row in range(rows))


def is_of_rows(output: Any, rows: int) -> bool:
    """An output is a tensor with so many rows, or a list of these."""
    tensors = output if isinstance(output, (list, tuple)) else [output]
    return all(isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.size(0) == rows for tensor in tensors)


def signature(call: ForwardCall, options: Mapping[str, Any], counts: tuple[int, ...]) -> Hashable:
    """Forwards of one signature go the same way through a model's code, as far as its arguments tell."""
    arguments = {**call.named, **call.extra}
    rows = call.x.size(0)
    # a model may look at the first timestep and take it for that of all rows
    alike = tuple(_all_equal(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.shape == (rows,))
    names = tuple(sorted(key for key, value in options.items() if value is not None))
    return (call.method, counts, _outline(arguments), alike, names, str(options.get("cond_or_uncond")))


def _outline(value: Any, listed: bool = False) -> Hashable:
    """Shapes, types and names. Numbers only where they lie in a list, which may have one for each row."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), str(value.dtype))
    if isinstance(value, dict):
        return tuple((str(key), _outline(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_outline(item, listed=True) for item in value))
    return repr(value) if listed and isinstance(value, _PLAIN) else type(value).__name__


def _conditionings(options: Mapping[str, Any]) -> int:
    return len(options.get("cond_or_uncond") or (0,))


def _fits(key: str, value: Any, rows: int, conditionings: int) -> bool:
    """It is known what of this option belongs to some of the rows."""
    if key in _OF_ALL_ROWS or isinstance(value, _PLAIN):
        return True
    if key == WINDOW:
        return getattr(value, "dim", 0) != 0
    if key in PER_CONDITIONING:
        return isinstance(value, list) and len(value) == conditionings
    if isinstance(value, Tensor):
        return not value.dim() or value.size(0) in ((1, rows // conditionings) if key == _SIGMAS else (1,))
    # what can be added to may be kept for the next forward, and each rank would add its own
    return isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value)


def _crosses(latents: int, first: int, count: int) -> bool:
    """These rows are of several conditionings, and not all rows of each."""
    of_one = first // latents == (first + count - 1) // latents
    return not of_one and bool(first % latents or (first + count) % latents)


def _per_row(latents: int, counts: tuple[int, ...]) -> bool:
    return any(_crosses(latents, sum(counts[:rank]), count) for rank, count in enumerate(counts))


def _all_equal(tensor: Any) -> bool:
    return not isinstance(tensor, Tensor) or not tensor.dim() or bool((tensor == tensor[:1]).all())
