"""Cases of Wan and LTX that other layouts and degrees could get wrong: masks, guides and extra tokens in tiles, rings, CFG halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from host import test_ltx as ltx
from host import test_wan as wan
from host.graphs import Case, compare, run_sp

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DEVICES = "cpu:4"

WAN_FRAMES = wan.frame_timesteps("ramp", wan.two_videos_with_a_ramp)
LTX_MASK = ltx.with_mask("tiny_ltx23", ltx.BOTH, "corner;ramp")
LTX_FRAMES = ltx.with_mask("tiny_ltxav", ltx.BOTH, "ramp;none")
LTX_GUIDES = ltx.guides("tiny_ltx23", "strengths", ltx.STRENGTHS, audio=True)
LTX_STG = ltx.guided("tiny_ltxav", "both_guidances", ltx.spatio_temporal_guidance, ltx.modality_guidance)
LTX_VIDEO = ltx.guides("tiny_ltxv", "masked", ltx.MASKED)
LTX_SMALL = ltx.guides("tiny_ltx23", "small", ltx.SMALL, audio=True, video=ltx.HALVABLE)

#: inputs of SP Model Patch, what the report says then, and cases
REQUESTS: dict[str, tuple[dict[str, Any], str, list[Case]]] = {
    "auto": ({}, "4 devices", [wan.two_videos_of_odd_size, WAN_FRAMES, LTX_MASK, LTX_GUIDES, LTX_STG, LTX_VIDEO]),
    "tiles": (
        {"layout": "tiles", "cfg_split": 1},
        "tiles 1x4",
        [wan.reference_latent, wan.in_context_latents, LTX_MASK, LTX_FRAMES, LTX_GUIDES],
    ),
    "ring": ({"ring": 2, "cfg_split": 1}, "ring 2", [WAN_FRAMES, LTX_MASK]),
}


def cases() -> list[Any]:
    return [
        pytest.param(requested, words, case, id=f"{name}-{case.__name__}")
        for name, (requested, words, chosen) in REQUESTS.items()
        for case in chosen
    ]


@pytest.mark.parametrize(("requested", "words", "case"), cases())
def test_same_as_stock(server: ComfyServer, requested: dict[str, Any], words: str, case: Case, require: Callable[[Case], None]) -> None:
    require(case)
    assert words in compare(server, case, DEVICES, **requested).decision


def test_tokens_that_are_no_grid(server: ComfyServer, require: Callable[[Case], None]) -> None:
    """Guides smaller than the video leave holes in the token grid."""
    require(LTX_SMALL)
    with pytest.raises(PromptFailed, match="cannot be tiled"):
        run_sp(server, LTX_SMALL, DEVICES, layout="tiles")


def test_guide_masks_in_a_ring(server: ComfyServer) -> None:
    with pytest.raises(PromptFailed, match="Ring attention cannot use a guide mask"):
        run_sp(server, LTX_GUIDES, DEVICES, ring=2, cfg_split=1)
