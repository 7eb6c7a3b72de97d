"""Other ways to lay a forward over four workers: CFG halves, tiles, rings. The picture stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from host import test_ltx as ltx
from host import test_wan as wan
from host.graphs import Case, compare, run_sp

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DEVICES = "cpu:4"

WAN_PLAIN = wan.text_to_video
WAN_BATCH = wan.two_videos_of_odd_size
WAN_FRAMES = wan.frame_timesteps("ramp", wan.two_videos_with_a_ramp)
LTX_PLAIN = ltx.plain("tiny_ltxav", ltx.BOTH)
LTX_MASK = ltx.with_mask("tiny_ltx23", ltx.BOTH, "corner;ramp")
LTX_FRAMES = ltx.with_mask("tiny_ltxav", ltx.BOTH, "ramp;none")
LTX_GUIDES = ltx.guides("tiny_ltx23", "strengths", ltx.STRENGTHS, audio=True)
LTX_STG = ltx.guided("tiny_ltxav", "both_guidances", ltx.spatio_temporal_guidance, ltx.modality_guidance)
LTX_VIDEO = ltx.guides("tiny_ltxv", "masked", ltx.MASKED)

LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "auto": ({}, "CFG 2, Ulysses 2"),
    "tiles": ({"layout": "tiles", "cfg_split": 1}, "tiles"),
    "ring": ({"ring": 2, "cfg_split": 1}, "ring 2"),
    "cfg_ring": ({"ring": 2, "cfg_split": 2}, "CFG 2"),
    "all_ring": ({"ring": 4}, "ring 4"),
}
CASES: dict[str, list[Case]] = {
    "auto": [WAN_PLAIN, WAN_BATCH, WAN_FRAMES, LTX_PLAIN, LTX_MASK, LTX_FRAMES, LTX_GUIDES, LTX_STG, LTX_VIDEO],
    "tiles": [WAN_PLAIN, wan.reference_latent, wan.in_context_latents, LTX_PLAIN, LTX_MASK, LTX_FRAMES],
    "ring": [WAN_PLAIN, WAN_FRAMES, LTX_PLAIN, LTX_MASK, LTX_STG],
    "cfg_ring": [WAN_BATCH, LTX_FRAMES],
    "all_ring": [WAN_PLAIN, LTX_PLAIN],
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases], ids=lambda value: getattr(value, "__name__", value)
)
def test_same_as_stock(server: ComfyServer, name: str, case: Case, require: Callable[[Case], None]) -> None:
    require(case)
    pins, words = LAYOUTS[name]
    assert words in compare(server, case, DEVICES, **pins).layout


def test_layouts_that_cannot_be(server: ComfyServer) -> None:
    with pytest.raises(PromptFailed, match="tiled"):
        run_sp(server, LTX_GUIDES, DEVICES, layout="tiles")
    with pytest.raises(PromptFailed, match="guide mask"):
        run_sp(server, LTX_GUIDES, DEVICES, ring=2)
    with pytest.raises(PromptFailed, match="cannot be laid over 4 devices"):
        run_sp(server, WAN_PLAIN, DEVICES, ring=3)
