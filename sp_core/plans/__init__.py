"""Sequence plans: how each architecture is cut over the ranks, and the engine that does it."""

from __future__ import annotations

from torch import nn

from .engine import Engine
from .hunyuan import HUNYUAN_VIDEO
from .kandinsky import KANDINSKY5
from .longcat import LONGCAT_VIDEO
from .ltx import LTXAV, LTXV
from .minimax import MINIMAX_H3
from .plan import Attention, Blocks, NoPlan, SequencePlan, Site
from .run import Escaped
from .wan import WAN
from .wan_family import WAN_FAMILY

PLANS: dict[str, SequencePlan] = {
    plan.architecture: plan for plan in (WAN, *WAN_FAMILY, HUNYUAN_VIDEO, MINIMAX_H3, LTXV, LTXAV, LONGCAT_VIDEO, KANDINSKY5)
}


def plan_named(architecture: str) -> SequencePlan:
    """The plan of a class name.

    Raises:
        NoPlan: there is none.
    """
    if architecture not in PLANS:
        raise NoPlan(architecture, sorted(PLANS))
    return PLANS[architecture]


def plan_for(model: nn.Module) -> SequencePlan:
    """The plan of a diffusion model. Subclasses have forwards of their own, so only the class itself counts."""
    return plan_named(type(model).__name__)


__all__ = ["PLANS", "Attention", "Blocks", "Engine", "Escaped", "NoPlan", "SequencePlan", "Site", "plan_for", "plan_named"]
