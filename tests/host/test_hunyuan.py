"""HunyuanVideo and HunyuanVideo 1.5 on 2 to 4 workers: text masks, guidance, and every way to begin from a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign import on_devices
from host.family_checkpoints import write_families
from host.graphs import Branch, Case, Link, compare, latent, load, run_sp, sample, text

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DEVICES = "cpu:2"
#: 80 x 112 pixels are 5 x 7 tokens a frame; 9 frames are 3 latent ones: 105 tokens, which neither 2 nor 4 divides
SIZE = {"width": 112, "height": 80, "length": 9, "batch_size": 1}
START = "1,16,3,10,14"


@pytest.fixture(scope="module", autouse=True)
def checkpoints(comfyui: Path, base: Path) -> None:
    write_families(comfyui, base, ["tiny_hunyuan", "tiny_hunyuan_i2v", "tiny_hunyuan15"])


@pytest.fixture(scope="module", params=on_devices())
def devices(request: pytest.FixtureRequest) -> str:
    return request.param


def words(branch: Branch, *, hidden: int = 2, **more: Any) -> tuple[Link, Link]:
    """Text with a pooled embedding, the last ``hidden`` tokens padding. The host takes a mask for one conditioning at a time only."""
    spec = json.dumps({"pooled_output": [1, 768], **more})
    made = [branch.add("SPTestConditioningTensors", conditioning=c, tensors=spec, seed=i)[0] for i, c in enumerate(text(branch, 64))]
    if hidden:
        made = [branch.add("SPTestTextMask", conditioning=c, hidden=hidden)[0] for c in made]
    return made[0], made[1]


def picture(branch: Branch) -> Link:
    return branch.add("SPTestImage", frames=1, height=80, width=112, seed=3)[0]


def text_to_video(branch: Branch) -> Link:
    positive, negative = words(branch)
    positive = branch.add("FluxGuidance", conditioning=positive, guidance=4.5)[0]
    return sample(branch, branch.patch(load(branch, "tiny_hunyuan")), (positive, negative), latent(branch, START), cfg=1.0)


def without_a_mask(branch: Branch) -> Link:
    return sample(branch, branch.patch(load(branch, "tiny_hunyuan")), words(branch, hidden=0), latent(branch, START))


def two_videos(branch: Branch) -> Link:
    return sample(branch, branch.patch(load(branch, "tiny_hunyuan")), words(branch, hidden=0), latent(branch, "2,16,2,6,10"), cfg=1.0)


def fewer_tokens_than_usual(branch: Branch) -> Link:
    """Three tokens: with four ranks one has none."""
    return sample(branch, branch.patch(load(branch, "tiny_hunyuan")), words(branch), latent(branch, "1,16,1,2,6"), cfg=1.0)


def from_a_picture(name: str, guidance_type: str, label: str) -> Case:
    def case(branch: Branch) -> Link:
        positive, negative = words(branch)
        vae = branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0]
        made = branch.add(
            "HunyuanImageToVideo", positive=positive, vae=vae, start_image=picture(branch), guidance_type=guidance_type, **SIZE
        )
        return sample(branch, branch.patch(load(branch, name)), (made[0], negative), made[1], cfg=1.0 if label == "concatenated" else 4.0)

    case.__name__ = f"from_a_picture_{label}"
    return case


def version_15(branch: Branch) -> Link:
    return sample(branch, branch.patch(load(branch, "tiny_hunyuan15")), words(branch), latent(branch, "1,32,3,5,7"), cfg=1.0)


def version_15_from_a_picture(branch: Branch) -> Link:
    """Glyph text and picture embeddings join the text's tokens."""
    positive, negative = words(branch, hidden=0, conditioning_byt5small=[1, 5, 1472])
    made = branch.add(
        "HunyuanVideo15ImageToVideo",
        positive=positive,
        negative=negative,
        vae=branch.add("SPTestVAE", channels=32, time_stride=4, stride=16)[0],
        start_image=picture(branch),
        clip_vision_output=branch.add("SPTestVisionStates", tokens=6, dim=1152, seed=5)[0],
        **SIZE,
    )
    return sample(branch, branch.patch(load(branch, "tiny_hunyuan15")), (made[0], made[1]), made[2])


CASES: list[Case] = [
    text_to_video,
    without_a_mask,
    two_videos,
    fewer_tokens_than_usual,
    from_a_picture("tiny_hunyuan_i2v", "v1 (concat)", "concatenated"),
    from_a_picture("tiny_hunyuan", "v2 (replace)", "token_replace"),
    from_a_picture("tiny_hunyuan", "custom", "reference"),
    version_15,
    version_15_from_a_picture,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_same_as_stock(server: ComfyServer, devices: str, case: Case, require: Callable[[Case], None]) -> None:
    require(case)
    compare(server, case, devices, cfg_split=1)


def test_a_ring_is_refused_with_the_reason(server: ComfyServer) -> None:
    """Its text would come out different on each rank of the ring."""

    def ring(branch: Branch) -> Link:
        wire = branch.add("SPModelPatch", model=load(branch, "tiny_hunyuan"), devices=DEVICES, ring=2)[0]
        return sample(branch, wire, words(branch), latent(branch, START), cfg=1.0)

    with pytest.raises(PromptFailed, match="Leave ring at 0"):
        run_sp(server, ring)
