"""Sequence plans: how each architecture is split over the ranks, and the engine that does it."""

from __future__ import annotations

from .architectures.cogvideo import COGVIDEOX
from .architectures.cosmos import ANIMA, COSMOS1, COSMOS_PREDICT2
from .architectures.flux import FLUX_FAMILY
from .architectures.hidream import AURA_FLOW, HIDREAM
from .architectures.hunyuan import HUNYUAN_VIDEO
from .architectures.kandinsky import KANDINSKY5
from .architectures.longcat import LONGCAT_AVATAR, LONGCAT_VIDEO
from .architectures.ltx import LTXAV, LTXV
from .architectures.lumina import LUMINA_FAMILY
from .architectures.minimax import MINIMAX_H3
from .architectures.mochi import MOCHI
from .architectures.omnigen import BOOGU, OMNIGEN2
from .architectures.pictures import IDEOGRAM4, JOY_IMAGE, KREA2, LENS, MAGE_FLOW
from .architectures.pictures_without_options import WITHOUT_OPTIONS
from .architectures.pixeldit import PIXEL_DIT
from .architectures.qwen_image import QWEN_IMAGE
from .architectures.seedvr import SEEDVR2
from .architectures.stable_diffusion import SD3
from .architectures.wan import WAN
from .architectures.wan_animate2 import ANIMATE2
from .architectures.wan_causal import CAUSAL
from .architectures.wan_family import WAN_FAMILY
from .architectures.wandancer import DANCER
from .engine import Engine
from .forward_state import Escaped
from .host_functions import HostFunctions
from .plan import Attention, Blocks, HookPoint, MaskRule, NoPlan, Replicated, SequencePlan
from .subclass import base_of_pack, code_of_packs, replaced_methods
from .unplanned import NOT_SAMPLED, plan_without, runs_wrappers
from .validation import validate

PLANS: dict[str, SequencePlan] = {
    plan.architecture: plan
    for plan in (
        *(
            WAN,
            *WAN_FAMILY,
            DANCER,
            CAUSAL,
            ANIMATE2,
            LTXV,
            LTXAV,
            HUNYUAN_VIDEO,
            LONGCAT_VIDEO,
            LONGCAT_AVATAR,
            KANDINSKY5,
            MINIMAX_H3,
            COGVIDEOX,
            COSMOS1,
            COSMOS_PREDICT2,
            MOCHI,
            SEEDVR2,
        ),
        # pictures
        *(
            *FLUX_FAMILY,
            QWEN_IMAGE,
            *LUMINA_FAMILY,
            SD3,
            HIDREAM,
            AURA_FLOW,
            OMNIGEN2,
            BOOGU,
            IDEOGRAM4,
            KREA2,
            ANIMA,
            JOY_IMAGE,
            LENS,
            MAGE_FLOW,
            *WITHOUT_OPTIONS,
            PIXEL_DIT,
        ),
    )
}


def plan_named(architecture: str) -> SequencePlan:
    """The plan of a diffusion model's class. Subclasses have forwards of their own, so only the class itself counts.

    Raises:
        NoPlan: there is none.
    """
    if architecture not in PLANS:
        raise NoPlan(architecture, titles())
    return PLANS[architecture]


def plan_of(kind: type, instead_of: type | None = None) -> SequencePlan:
    """The plan of a model's class, or of the class that a pack made it of, or of the class ``instead_of`` which it stands.

    Where there is none, what is known of a class without one.
    """
    for candidate in (kind, instead_of):
        if candidate is not None and base_of_pack(candidate).__name__ in PLANS:
            return PLANS[base_of_pack(candidate).__name__]
    return plan_without(kind)


def titles() -> list[str]:
    """The models whose tokens can be shared out, by the names that people know them by."""
    return [plan.title for plan in PLANS.values()]


__all__ = [
    "NOT_SAMPLED",
    "PLANS",
    "Attention",
    "Blocks",
    "Engine",
    "Escaped",
    "HookPoint",
    "HostFunctions",
    "MaskRule",
    "NoPlan",
    "Replicated",
    "SequencePlan",
    "base_of_pack",
    "code_of_packs",
    "plan_named",
    "plan_of",
    "plan_without",
    "replaced_methods",
    "runs_wrappers",
    "titles",
    "validate",
]
