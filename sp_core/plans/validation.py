"""Whether a plan fits a model: every module, parameter and method that it names is there.

ComfyUI renames things. A plan that no longer fits is refused when a worker has loaded the model,
before anything is installed, by a sentence that names what is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..errors import SPError
from .arguments import names_of
from .plan import Attention, Blocks, HookPoint, SequencePlan


class _Missing(Exception):
    """Says what is missing."""


def validate(plan: SequencePlan, model: nn.Module, host: str) -> None:
    """Check everything that the plan names against a model.

    Args:
        model: the diffusion model; weights are not looked at.
        host: what the model comes from, as a person reads it: "ComfyUI 0.33.0".

    Raises:
        SPError: something that the plan names is not there; the sentence says what, where and in which ``host``.
    """
    try:
        _check_methods(plan, model)
        for blocks in plan.blocks:
            _check_blocks(blocks, model)
        for point in plan.hook_points:
            _check_hook_point(point, model)
    except _Missing as missing:
        raise SPError(
            f"{plan.title} cannot run on several devices with {host}: {missing}, which the sequence plan of {plan.architecture} names. "
            "Update this extension, or remove SP Model Patch to run the model on one device"
        ) from None


def _check_methods(plan: SequencePlan, model: nn.Module) -> None:
    after_run = [plan.after_run] if plan.after_run else []
    before = [plan.split_behind.method] if plan.split_behind is not None else []
    for name in (plan.forward, *before, *plan.further_forwards, *plan.caches.values(), *plan.weight_methods, *after_run):
        if not callable(getattr(model, name, None)):
            raise _Missing(f"{type(model).__name__} has no method {name}")
    _check_parameters(type(model), plan.forward, (*plan.residuals, *plan.to_plain))
    for name in plan.further_forwards:
        _check_parameters(type(model), name, plan.caches)


def _check_blocks(blocks: Blocks, model: nn.Module) -> None:
    found = _find(model, blocks.path)
    if not isinstance(found, Iterable):
        raise _Missing(f"{blocks.path} of {type(model).__name__} is no list of blocks")
    replicated = blocks.replicated.argument if blocks.replicated is not None else None
    for block in blocks.of(model):
        _find(block, blocks.method)
        _check_parameters(type(block), blocks.method, (blocks.stream, *blocks.shard, *([replicated] if replicated else [])))
        if blocks.parameters and not _takes_anything(type(block).forward):
            raise _Missing(f"{type(block).__name__}.forward has parameters of its own and no *args")
        for attention in blocks.attentions:
            _check_attention(attention, block)
        for path in blocks.joined:
            if not isinstance(_find(block, path), nn.Module):
                raise _Missing(f"{path} of {type(block).__name__} is no module, so what it tells cannot be joined")


def _check_attention(attention: Attention, block: nn.Module) -> None:
    module = _find(block, attention.module)
    _find(module, attention.heads_of)
    if attention.own_heads is not None:
        for path in (attention.own_heads.into, attention.own_heads.out, attention.own_heads.heads):
            _find(module, path)
        return
    _find(module, attention.method)
    rule = attention.mask
    given = [] if rule is None else [rule.parameter, *rule.together_with]
    if not attention.function:
        given.append("transformer_options")
    elif attention.function not in names_of(getattr(type(module), attention.method)):
        raise _Missing(f"the code of {type(module).__name__} has no {attention.function}")
    _check_parameters(type(module), attention.method, given)


def _check_hook_point(point: HookPoint, model: nn.Module) -> None:
    parent_path, _, name = point.path.rpartition(".")
    parent = _find(model, parent_path)
    found = _find(parent, name)
    if isinstance(found, nn.Module):
        _check_parameters(type(found), "forward", point.shard)
    elif point.gather:
        raise _Missing(f"{name} of {type(parent).__name__} is no module, so its output cannot be gathered")
    else:
        _check_parameters(type(parent), name, point.shard)


def _find(module: Any, path: str) -> Any:
    """What a dotted path below ``module`` leads to; ``module`` itself for an empty path."""
    for name in path.split(".") if path else ():
        if getattr(module, name, None) is None:
            raise _Missing(f"{type(module).__name__} has no {name}")
        module = getattr(module, name)
    return module


def _takes_anything(function: Callable[..., Any]) -> bool:
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in inspect.signature(function).parameters.values())


def _check_parameters(owner: type, method: str, names: Iterable[str]) -> None:
    function: Callable[..., Any] = getattr(owner, method)
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {parameter.name for parameter in parameters}
    for name in names:
        if name not in known:
            raise _Missing(f"{owner.__name__}.{method} has no parameter {name}")
