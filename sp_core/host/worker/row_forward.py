"""Runs one forward whose tokens are not split: each rank computes some of the batch rows, or the first rank all of them.

That a model keeps its batch rows apart is proven, not assumed. Every rank that is to have rows computes the first forward of each
kind whole, whose output is ComfyUI's. Later forwards of this kind are shared out if three things hold on all of these ranks:

1. The model kept nothing of the forward.
2. With other rows beside them, the rank's own rows give the same bits. So nothing of the others comes into them, however little.
3. Alone, the rank's own rows give the same but for rounding.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...errors import SPError
from ...parallel.groups import ParallelGroups
from ...plans.engine import EnterBlock
from ...plans.unplanned import blocks_in
from ..block_skips import put_skips
from .arrival import late_forwards
from .batch_rows import (
    RowChoice,
    is_of_rows,
    row_counts,
    rows_agree,
    rows_of_call,
    rows_of_options,
    same_bits,
    signature,
    why_together,
    with_other_rows,
)
from .cfg_split import join_parts, rows_of_tensors
from .forward import transformer_options
from .forward_call import ForwardCall
from .kept_state import KeptState
from .patch_check import foreign_code, wants_whole_batch
from .residency import LoadedModel

log = logging.getLogger(__name__)

#: so often is a model tried again that kept something: what it makes once (a table of rotations) it makes in its first forward
TRIES = 3
#: (rows that this rank is to compute) -> None: brings the model to the device, with room for them
Activate = Callable[[int], None]


@dataclass(frozen=True)
class RowResult:
    """The output for all rows, how many ranks joined it of shares, and what people are told."""

    output: Any
    ranks: int
    told: str


#: ComfyUI's name of patches behind the embedding of the input
_INPUT_PATCH = "post_input"


def why_unsplit(model: LoadedModel, call: ForwardCall) -> str:
    """Why tokens of this forward are not split although its model has a plan; "" where they are, and without a plan."""
    plan, requested = model.plan, call.requested
    if not plan.splits_tokens or model.alone is not None:
        return ""
    no_ring = any(attention.kind == "joint" or attention.mask is not None for attention in plan.attentions)
    if not plan.strict and (requested.ring or 1) > 1 and no_ring:
        return "in a ring, which SP Model Patch was asked for and text or a second stream in the attention does not allow"
    if not plan.strict and requested.layout == "tiles" and plan.tiles is None:
        return "in tiles, which SP Model Patch was asked for"
    if model.unsplit or plan.strict:
        return model.unsplit
    options = transformer_options(model.patcher, call.options)
    if _INPUT_PATCH in (options.get("patches") or {}):
        return "with a patch on the model's input, which may take tokens away (Flux KV Cache)"
    return plan.rows_where({**call.named, **call.extra, "transformer_options": options})


def row_choice(model: LoadedModel, call: ForwardCall, world_size: int, unsplit: str = "") -> RowChoice:
    """Who computes which rows, as far as it follows from facts that all ranks have.

    Args:
        unsplit: what :func:`why_unsplit` says.
    """
    architecture, rows = model.plan.architecture, call.x.size(0)
    options, counts = transformer_options(model.patcher, call.options), row_counts(rows, world_size)
    if model.alone is not None:
        why = f"but the class {model.alone} is another node pack's, which may keep something between forwards"
    elif call.requested.cfg == 1:
        why = "which cfg_split = 1 of SP Model Patch forbids"
    else:
        why = why_together(call, options, counts) or _foreign(model, call)
    return RowChoice(architecture, (rows,) if why else counts, world_size, why, unsplit)


def _foreign(model: LoadedModel, call: ForwardCall) -> str:
    if not wants_whole_batch(model.patcher, model.modules, call.options):
        return ""
    code = foreign_code(model.patcher, model.modules, call.options)
    name = next(found.name for found in code if found.known is None or not found.known.rows_apart)
    return f"but {name} runs inside the model and may compare them"


def run_rows(
    model: LoadedModel, call: ForwardCall, choice: RowChoice, groups: ParallelGroups, enter_block: EnterBlock, activate: Activate
) -> RowResult | None:
    """The forward on the ranks of ``groups``; None on a rank that has nothing to do. Collective.

    Args:
        choice: the same on every rank.
        enter_block: called before each block; see :class:`sp_core.plans.Engine`.
    """
    run = _Run(model, call, choice, groups, enter_block)
    groups.sequence.stats.reset()
    kind = signature(call, transformer_options(model.patcher, call.options), choice.counts)
    why = choice.why or model.row_proofs.found.get(kind)
    if why is None:
        activate(run.rows)
        return RowResult(run.proof(kind), 1, choice.line_of_proof)
    if why:
        if groups.sequence.rank:
            return None
        activate(run.rows)
        return RowResult(run.whole(), 1, replace(choice, counts=(run.rows,), why=why).line(""))
    activate(choice.counts[groups.sequence.rank])
    output = run.joined(run.own_rows())
    groups.sequence.check()
    return RowResult(output, len(choice.counts), choice.line(groups.sequence.all_ranks.name))


class _Run:
    """One forward on one rank."""

    def __init__(self, model: LoadedModel, call: ForwardCall, choice: RowChoice, groups: ParallelGroups, enter_block: EnterBlock) -> None:
        self.model, self.call, self.counts, self.sequence = model, call, choice.counts, groups.sequence
        self.rows = call.x.size(0)
        rank = groups.sequence.rank
        self._first, self._count = sum(choice.counts[:rank]), choice.counts[rank]
        self._enter_block = enter_block

    def whole(self) -> Any:
        """The output for all rows, computed on this rank."""
        # copies: a model may write into what it is given, and take from its lists
        named, extra = (tree_map_only(Tensor, torch.clone, tree) for tree in (self.call.named, self.call.extra))
        return self._computed(replace(self.call, named=named, extra=extra), self._options())

    def own_rows(self) -> Any:
        """The output for this rank's rows."""
        options = rows_of_options(self._options(), self.rows, self._first, self._count)
        return self._computed(rows_of_call(self.call, self._first, self._count), options)

    def _options(self) -> dict[str, Any]:
        return transformer_options(self.model.patcher, self.call.options)

    def joined(self, output: Any) -> Any:
        return join_parts(output, self.sequence.all_ranks, self.counts)

    def proof(self, kind: Hashable) -> Any:
        """The whole output. Finds out whether forwards of this kind can be shared out. Collective."""
        proofs, before = self.model.row_proofs, KeptState(self.model.modules)
        whole = self.whole()
        kept = before.changed()
        if self._any_rank([kept is not None])[0]:
            proofs.tries[kind] = proofs.tries.get(kind, 0) + 1
            if proofs.tries[kind] >= TRIES:
                self._found(kind, f"but the model keeps something between forwards ({kept or 'on another rank'})")
            return whole
        beside, failed, alone = self._any_rank(self._differences(whole))
        if beside:
            self._found(kind, "but what one of them gives depends on the others")
        elif failed:
            self._found(kind, "but the model does not compute some of them alone")
        else:
            self._found(kind, "but they come out otherwise alone" if alone else "")
        return whole

    def _differences(self, whole: Any) -> tuple[bool, bool, bool]:
        """Of this rank's rows: others beside them change them; they cannot be computed alone; alone they are others."""
        mine = rows_of_tensors(whole, self.rows, self._first, self._count)
        beside = False
        try:
            # of equal shape, so that every bit has to be the same
            other = self._computed(with_other_rows(self.call, self._first, self._count), self._options())
            beside = not same_bits(rows_of_tensors(other, self.rows, self._first, self._count), mine)
            own = self.own_rows()
            return beside, not is_of_rows(own, self._count), not rows_agree(own, mine, self._count)
        except SPError:
            raise
        except Exception as error:
            log.info("SP: a share of the batch rows cannot be computed alone: %s: %s", type(error).__name__, error)
            return beside, True, False

    def _found(self, kind: Hashable, why: str) -> None:
        self.model.row_proofs.found[kind] = why
        log.info("SP: batch rows of %s %s", self.model.plan.architecture, f"stay together, {why}" if why else "are shared out")

    def _computed(self, call: ForwardCall, options: dict[str, Any]) -> Any:
        model = self.model.diffusion_model
        with late_forwards(model, self.call.options), entering(blocks_in(model), self._enter_block):
            return call.on(model, put_skips(options))

    def _any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag, whether it is up on any rank."""
        own = torch.tensor([[[float(flag) for flag in flags]]], device=self.call.x.device)
        told = self.sequence.all_ranks.all_gather_tokens(own, [1] * self.sequence.world_size)
        return [bool(up) for up in (told[0].cpu().sum(0) > 0)]


@contextlib.contextmanager
def entering(blocks: Sequence[nn.Module], enter_block: EnterBlock) -> Iterator[None]:
    """Inside, ``enter_block`` is called at each block's first call. Ranks with other rows call blocks equally often only so."""
    entered: set[int] = set()

    def enter(index: int, *_: Any) -> None:
        if index not in entered:
            entered.add(index)
            enter_block(index, len(blocks))

    with contextlib.ExitStack() as undo:
        for index, block in enumerate(blocks):
            undo.callback(block.register_forward_pre_hook(functools.partial(enter, index)).remove)
        yield
