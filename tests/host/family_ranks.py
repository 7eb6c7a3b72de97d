"""The families' forwards over ranks, each against the same forward in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from distributed.longcat_ranks import enter_host
from host.families import FAMILIES
from host.family_inputs import METHOD
from host.foreign_attention import nothing_foreign
from torch import Tensor

from sp_core.demo.run import relative_l2

Around = Callable[[Any, Any], AbstractContextManager[list[str]]]


def serve(comfyui: str, rank: int, world_size: int) -> Callable[..., dict[str, Any] | None]:
    """One rank: answers (family, forward, size of the group, layout, weights of the ranks, foreign code) with its error and its bits.

    Foreign code is of :mod:`.foreign_attention`, in the stock forward too.
    """
    import torch.distributed as dist

    enter_host(comfyui)
    from sp_core.attention.sequence_group import SequenceGroup
    from sp_core.comm import CollectiveTransport
    from sp_core.host.worker.comfy_attention import host_functions
    from sp_core.host.worker.verify import digest
    from sp_core.layout import Shares
    from sp_core.plans import Engine, plan_named, validate
    from sp_core.plans.shape import model_shape
    from sp_core.plans.whole import Foreign

    groups = {size: dist.new_group(list(range(size))) for size in range(2, world_size + 1)}
    models: dict[str, Any] = {}

    def answer(
        family: str, name: str, size: int, layout: str, weights: tuple[int, ...] = (), foreign: Around = nothing_foreign
    ) -> dict[str, Any] | None:
        if rank >= size:
            return None
        if not FAMILIES[family].known_to_the_host():
            return {"missing": FAMILIES[family].class_name}
        try:
            return compared(family, name, size, layout, Shares.of(weights) if weights else None, foreign)
        except Exception as error:
            # not raised: the ranks stay in step for the next case
            return {"failure": traceback.format_exc(), "kind": type(error).__name__}

    @torch.inference_mode()
    def compared(family: str, name: str, size: int, layout: str, shares: Shares | None, foreign: Around) -> dict[str, Any]:
        plan = plan_named(FAMILIES[family].class_name)
        if family not in models:
            models[family] = FAMILIES[family].build()
            validate(plan, models[family], "this ComfyUI")
        model, make = models[family], FAMILIES[family].forwards[name]
        transport = CollectiveTransport(groups[size])
        sequence = SequenceGroup(transport, transport, shares=shares)
        out: list[Tensor] = []
        with foreign(model, plan) as paths:
            stock = [part for inputs in _calls(make()) for part in _forward(model, plan.forward, inputs)]
            code = Foreign(dict.fromkeys(paths, "foreign"), lambda place, function: "foreign")
            for inputs in _calls(make()):
                engine = Engine(plan, sequence, layout=layout, inputs=inputs, host=host_functions(), foreign=code)
                with FAMILIES[family].patched(), engine.installed(model) as state:
                    out += _forward(model, plan.forward, inputs)
                    state.check()
        errors = [relative_l2(mine, theirs) for mine, theirs in zip(out, stock, strict=True)]
        shape = model_shape(plan, model)
        return {
            "errors": errors,
            "width": shape and shape.width,
            "bits": digest(out),
            "layout": state.describe(),
            "whole": list(state.got_whole),
            "exchanges": transport.stats.exchanges,
            "alive": min(float(part.std()) for part in stock),
        }

    return answer


def _calls(made: Any) -> Iterable[dict[str, Any]]:
    """The forwards of a case: one, or some that follow one another."""
    return [made] if isinstance(made, dict) else made


def _forward(model: Any, method: str, inputs: dict[str, Any]) -> list[Tensor]:
    """``inputs`` may name another method than the plan's, which then takes no options."""
    options = {} if METHOD in inputs else {"transformer_options": {}}
    arguments = {name: value for name, value in inputs.items() if name != METHOD}
    out = getattr(model, inputs.get(METHOD, method))(**{**options, **arguments})
    return list(out) if isinstance(out, (list, tuple)) else [out]
