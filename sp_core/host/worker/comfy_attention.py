"""Finds the functions of ComfyUI that a plan's hooks call."""

from __future__ import annotations

import inspect
from typing import Any

from ...plans.host_functions import HostFunctions


def host_functions() -> HostFunctions:
    """ComfyUI's attention, and LTX's for guide masks where this version has one."""
    import comfy.ldm.lightricks.model as lightricks
    import comfy.ldm.modules.attention as attention

    found: dict[str, Any] = {"optimized_attention": attention.optimized_attention}
    if hasattr(lightricks, "_attention_with_guide_mask"):
        found["guide_mask_attention"] = lightricks._attention_with_guide_mask
    found["named"] = lambda name: inspect.unwrap(getattr(attention, name))
    names = [name for name in vars(attention) if name.startswith("optimized_attention")]
    before = [getattr(attention, name) for name in names]
    found["is_swapped"] = lambda: any(getattr(attention, name) is not was for name, was in zip(names, before, strict=True))
    return HostFunctions(**found)
