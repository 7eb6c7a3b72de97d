"""VAEs over several ranks: each computes a band of the frame's rows, and what it needs of the others' rows comes from them."""

from __future__ import annotations

from typing import Any

from .cogvideo import COGVIDEOX
from .cosmos import COSMOS
from .engine import BandEngine
from .exchange import RowExchange
from .hunyuan import HUNYUAN_VIDEO, HUNYUAN_VIDEO_15
from .ltx import LTX_VIDEO
from .minimax import MINIMAX_H3
from .mochi import MOCHI
from .plan import DECODE_AND_ENCODE, DecodePlan, without_plan
from .seedvr2 import SEEDVR2
from .validation import why_not
from .wan import WAN_21, WAN_22

_ALL = (WAN_21, WAN_22, LTX_VIDEO, HUNYUAN_VIDEO, HUNYUAN_VIDEO_15, COGVIDEOX, MOCHI, COSMOS, SEEDVR2, MINIMAX_H3)
PLANS: dict[str, DecodePlan] = {plan.architecture: plan for plan in _ALL}


def architecture_of(vae: Any) -> str:
    """Module and name of a VAE's class, as a plan names it; with those of the decoder where the class takes any decoder."""
    name = f"{type(vae).__module__}.{type(vae).__qualname__}"
    takes_any = type(vae).__module__ == "comfy.ldm.models.autoencoder" and hasattr(vae, "decoder")
    return f"{name}({architecture_of(vae.decoder)})" if takes_any else name


def plan_for(vae: Any) -> DecodePlan | None:
    """The plan of a VAE; None where there is none. Subclasses have forwards of their own, so only the class itself counts."""
    return PLANS.get(architecture_of(vae))


__all__ = [
    "DECODE_AND_ENCODE",
    "PLANS",
    "BandEngine",
    "DecodePlan",
    "RowExchange",
    "architecture_of",
    "plan_for",
    "why_not",
    "without_plan",
]
