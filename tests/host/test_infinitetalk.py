"""Patches on Wan. InfiniteTalk: on its attention, and for two speakers another one that leaves it a map of who speaks where. Uni3C."""

from __future__ import annotations

import json
from typing import Any

import campaign
import pytest
from host.graphs import Branch, Case, Link, compare, latent, sample, text

from sp_core.demo.comfy_server import ComfyServer

#: 40 heads of the patch's attention have 2 channels each
WAN = {
    "model_type": "i2v",
    "dim": 80,
    "ffn_dim": 64,
    "num_heads": 5,
    "num_layers": 3,
    "in_dim": 36,
    "out_dim": 16,
    "text_dim": 24,
}
SIZE = {"width": 112, "height": 80, "length": 9}


def speaking(name: str, speakers: int) -> Case:
    def case(branch: Branch) -> Link:
        model = branch.add("SPTestTinyModel", kind="WAN21_I2V", arguments=json.dumps(WAN), seed=3)[0]
        positive, negative = text(branch, 24)
        inputs: dict[str, Any] = {"mode": "single_speaker"}
        if speakers == 2:
            masks = [branch.add("SPTestMask", frames=1, height=80, width=112, right=right)[0] for right in (0.0, 1.0)]
            second = branch.add("SPTestSpeech", seed=2)[0]
            inputs = {"mode": "two_speakers", "mode.audio_encoder_output_2": second, "mode.mask_1": masks[0], "mode.mask_2": masks[1]}
        made = branch.add(
            "WanInfiniteTalkToVideo",
            **inputs,
            model=model,
            model_patch=branch.add("SPTestTalkingPatch", layers=3)[0],
            positive=positive,
            negative=negative,
            vae=branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0],
            start_image=branch.add("SPTestImage", frames=1, height=80, width=112, seed=3)[0],
            audio_encoder_output_1=branch.add("SPTestSpeech", seed=1)[0],
            motion_frame_count=5,
            audio_scale=1.0,
            **SIZE,
        )
        # the patch takes one conditioning a forward
        return sample(branch, branch.patch(made[0]), (made[1], made[2]), made[3], cfg=1.0)

    case.__name__ = name
    return case


CASES = {"one speaker": speaking("one_speaker", 1), "two speakers": speaking("two_speakers", 2)}


@pytest.mark.parametrize("devices", campaign.parameters(plain=["cpu:3"], campaign=["cpu:2"]))
@pytest.mark.parametrize("case", campaign.parameters(plain=["two speakers"], campaign=["one speaker"]))
def test_same_as_stock(server: ComfyServer, devices: str, case: str) -> None:
    assert "MultiTalkCrossAttnPatch" in compare(server, CASES[case], devices, cfg_split=1).sp.report


def guided(branch: Branch) -> Link:
    """Wan with Uni3C, whose blocks run beside those of Wan, one less of them."""
    wan = {**WAN, "dim": 96, "num_heads": 4}
    model = branch.add("SPTestTinyModel", kind="WAN21_I2V", arguments=json.dumps(wan), seed=3)[0]
    made = branch.add(
        "WanUni3CControlnetApply",
        model=model,
        model_patch=branch.add("SPTestUni3CPatch", layers=2)[0],
        vae=branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0],
        render_video=branch.add("SPTestImage", frames=9, height=80, width=112, seed=3)[0],
        strength=0.8,
        start_percent=0.0,
        end_percent=1.0,
    )
    return sample(branch, branch.patch(made[0]), text(branch, 24), latent(branch, "1,16,3,10,14"))


@pytest.mark.parametrize("devices", campaign.parameters(plain=["cpu:3"], campaign=["cpu:2"]))
def test_uni3c_is_the_same_as_stock(server: ComfyServer, devices: str) -> None:
    found = compare(server, guided, devices)
    assert "flat" in found.decision, found.sp.report
