"""Finds the functions of ComfyUI that a plan's hooks call."""

from __future__ import annotations

from ...plans.host_functions import HostFunctions


def host_functions() -> HostFunctions:
    """ComfyUI's attention, and LTX's for guide masks where this version has one."""
    import comfy.ldm.lightricks.model as lightricks
    import comfy.ldm.modules.attention as attention

    found = {"optimized_attention": attention.optimized_attention}
    if hasattr(lightricks, "_attention_with_guide_mask"):
        found["guide_mask_attention"] = lightricks._attention_with_guide_mask
    return HostFunctions(**found)
