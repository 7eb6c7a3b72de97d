"""Runs one forward of a diffusion model on this rank's share of the tokens and conditionings."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from ...parallel.groups import ParallelGroups, WeightGroup
from ...plans.compiled_blocks import Compiler
from ...plans.engine import Engine, EnterBlock
from ...plans.forward_state import Escaped, ForwardState
from ...plans.probing import Contents, Probing
from ...weights import Gathering
from ..block_skips import SKIPPED, put_skips
from ..compiled import WISH
from ..options import AROUND_THE_MODEL, INSIDE_THE_MODEL, LATE_FORWARDS
from . import cfg_split
from .arrival import late_forwards
from .comfy_attention import host_functions
from .forward_call import ForwardCall
from .patch_check import foreign_inside, unknown_functions
from .residency import LoadedModel

log = logging.getLogger(__name__)


def run_forward(
    model: LoadedModel,
    call: ForwardCall,
    groups: ParallelGroups,
    enter_block: EnterBlock,
    compiler: Compiler | None = None,
    weights: WeightGroup | None = None,
    activate_whole: Callable[[], None] = lambda: None,
) -> tuple[Any, ForwardState]:
    """The output for all tokens and conditionings, equal on all ranks of ``groups``, and how they were laid out. Collective.

    Args:
        call: the same on every rank.
        enter_block: called before each block; see :class:`sp_core.plans.Engine`.
        compiler: compiles the blocks, if they are to be.
        weights: gathers the model's shared weights; None where every rank has all of them.
        activate_whole: makes room for all tokens of this part of the batch, where a forward turns out not to be one that can be split.
    """
    groups.sequence.stats.reset()
    if model.alone is not None:
        return _run_alone(model, call, enter_block)
    if groups.cfg is not None:
        call = cfg_split.part_of_call(call, groups.cfg.rank, groups.cfg.world_size)
    with late_forwards(model.diffusion_model, call.options):
        output, state = _settled(model, call, groups, enter_block, compiler, weights, activate_whole)
    groups.sequence.check()
    if groups.cfg is not None:
        output = cfg_split.join_parts(output, groups.cfg)
        groups.cfg.check()
    return output, state


def _settled(
    model: LoadedModel,
    call: ForwardCall,
    groups: ParallelGroups,
    enter_block: EnterBlock,
    compiler: Compiler | None,
    weights: WeightGroup | None,
    activate_whole: Callable[[], None],
) -> tuple[Any, ForwardState]:
    """A forward in which no code of other packs was shared out that would have needed whole data."""
    contents = Contents(call.named, call.extra, call.options)
    while True:
        probing = _probing(model, call, groups)
        try:
            with _gathering(model, weights) as gathering:
                output, state = _attempt(model, call, groups, enter_block, probing, compiler, gathering)
        except Escaped as escaped:
            # on all ranks at the same place, for they run the same code; but CFG halves share the gathering of weights and run others
            if model.plan.strict or (groups.cfg is not None and weights is not None):
                raise
            if probing is not None:
                probing.give_up()
            contents.put_back()
            activate_whole()
            with _gathering(model, weights) as gathering:
                return _whole(model, call, enter_block, str(escaped), gathering)
        differing = probing.settle() if probing is not None else []
        if not differing:
            return output, state
        log.warning("%s began to compute in another way: this forward is computed again, with whole data for it", " and ".join(differing))
        contents.put_back()


def _gathering(model: LoadedModel, weights: WeightGroup | None) -> AbstractContextManager[Gathering | None]:
    if weights is None or model.shared is None:
        return contextlib.nullcontext()
    following = weights.following.setdefault((model.plan.architecture, len(model.shared.shards)), {})
    return model.shared.gathering(weights.transport, weights.lane, following)


def _attempt(
    model: LoadedModel,
    call: ForwardCall,
    groups: ParallelGroups,
    enter_block: EnterBlock,
    probing: Probing | None,
    compiler: Compiler | None,
    gathering: Gathering | None,
) -> tuple[Any, ForwardState]:
    inputs = {**call.named, **call.extra}
    engine = Engine(
        model.plan,
        groups.sequence,
        enter_block,
        layout=call.requested.layout,
        inputs=inputs,
        host=host_functions(),
        foreign=foreign_inside(model.patcher, model.modules),
        probing=probing,
        compiler=compiler,
        weights=gathering,
    )
    with engine.installed(model.diffusion_model) as state:
        options = put_skips(engine.adapted(transformer_options(model.patcher, call.options, gathering is not None), state))
        output = call.on(model.diffusion_model, options)
        state.check()
    return output, state


def _probing(model: LoadedModel, call: ForwardCall, groups: ParallelGroups) -> Probing | None:
    """What probes code of other packs in this forward; None where there is none, and where a forward cannot be computed twice."""
    functions = unknown_functions(model.patcher, model.modules, call.options)
    if not functions or model.verdicts is None or model.plan.keeps_state:
        return None
    shapes, structure = tree_flatten({**call.named, **call.extra})
    signature = (
        call.method,
        call.requested,
        (groups.sequence.world_size, groups.sequence.ring is not None, groups.cfg is not None, groups.sequence.shares),
        str(structure),
        tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in shapes),
        str([call.options.get(key) for key in ("cond_or_uncond", SKIPPED)]),
    )
    return Probing(model.verdicts, groups.sequence, signature, functions, call.x.device)


def _run_alone(model: LoadedModel, call: ForwardCall, enter_block: EnterBlock) -> tuple[Any, ForwardState]:
    """A forward of which nothing is shared out, on the one rank that computes it."""
    with late_forwards(model.diffusion_model, call.options):
        return _whole(model, call, enter_block)


def _whole(
    model: LoadedModel, call: ForwardCall, enter_block: EnterBlock, escaped: str = "", gathering: Gathering | None = None
) -> tuple[Any, ForwardState]:
    """A forward with nothing of this extension in it but shared weights. ``escaped``: what could not be shared out."""
    blocks = model.plan.blocks_of(model.diffusion_model)
    with contextlib.ExitStack() as undo:
        for index, block in enumerate(blocks):
            enter = functools.partial(_enter, enter_block, gathering, index, len(blocks))
            undo.callback(block.register_forward_pre_hook(enter).remove)
            if gathering is not None:
                undo.callback(block.register_forward_hook(functools.partial(_leave, gathering, index)).remove)
        options = put_skips(transformer_options(model.patcher, call.options, gathering is not None))
        output = call.on(model.diffusion_model, options)
    state = ForwardState(0, 1)
    state.escaped = escaped
    return output, state


def _enter(enter_block: EnterBlock, gathering: Gathering | None, index: int, count: int, *_: Any) -> None:
    enter_block(index, count)
    if gathering is not None:
        gathering.enter(index)


def _leave(gathering: Gathering, index: int, *_: Any) -> None:
    gathering.leave(index)


def transformer_options(patcher: Any, sent: dict[str, Any], gathers_weights: bool = False) -> dict[str, Any]:
    """The model's own options, of which ``sent`` by ComfyUI's process take precedence, as the host would hand them to the model.

    Args:
        gathers_weights: the blocks' weights are gathered, so the host is not to bring the blocks' own to the device ahead of them.
    """
    import comfy.utils

    own = comfy.utils.deepcopy_list_dict(patcher.model_options.get("transformer_options", {}))
    options = {key: value for key, value in own.items() if key not in AROUND_THE_MODEL} | sent
    # None stands for patches that a node behind SP Model Patch took away
    options = {key: value for key, value in options.items() if key != LATE_FORWARDS and not (key in INSIDE_THE_MODEL and value is None)}
    options.pop(WISH, None)
    options["prefetch_dynamic_vbars"] = not gathers_weights and bool(getattr(patcher, "is_dynamic", lambda: False)())
    return options
