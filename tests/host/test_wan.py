"""Wan 2.1 / 2.2: every way in that the host's nodes have, on 2 to 4 workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from host.graphs import Branch, Case, Link, compare, latent, load, sample, text

from sp_core.demo.comfy_server import ComfyServer

DIM = 4096
#: 80 x 112 pixels are 5 x 7 tokens a frame; 17 frames are 5 latent ones: 175 tokens, which neither 2 nor 3 nor 4 divides
SIZE = {"width": 112, "height": 80, "length": 17, "batch_size": 1}
VAE = {"channels": 16, "time_stride": 4, "stride": 8}


def shifted(branch: Branch, name: str) -> Link:
    return branch.patch(branch.add("ModelSamplingSD3", model=load(branch, name), shift=8.0)[0])


def picture(branch: Branch, frames: int = 1, seed: int = 3) -> Link:
    return branch.add("SPTestImage", frames=frames, height=80, width=112, seed=seed)[0]


def text_to_video(branch: Branch) -> Link:
    return sample(branch, shifted(branch, "tiny_wan_t2v"), text(branch, DIM), latent(branch, "1,16,5,10,14"))


def text_to_video_without_guidance(branch: Branch) -> Link:
    return sample(branch, shifted(branch, "tiny_wan_t2v"), text(branch, DIM), latent(branch, "1,16,5,10,14"), cfg=1.0)


def two_videos_of_odd_size(branch: Branch) -> Link:
    """Batch 2; height and width are not whole patches, so the model pads."""
    return sample(branch, shifted(branch, "tiny_wan_t2v"), text(branch, DIM), latent(branch, "2,16,3,9,11"))


def fewer_tokens_than_usual(branch: Branch) -> Link:
    """Three tokens: with four ranks one has none."""
    return sample(branch, shifted(branch, "tiny_wan_t2v"), text(branch, DIM), latent(branch, "1,16,1,2,6"))


def image_to_video(name: str, *, embeds: bool) -> Case:
    def case(branch: Branch) -> Link:
        conditioning = text(branch, DIM)
        extra = {"clip_vision_output": branch.add("SPTestClipVision", tokens=257, seed=4)[0]} if embeds else {}
        node = branch.add(
            "WanImageToVideo",
            positive=conditioning[0],
            negative=conditioning[1],
            vae=branch.add("SPTestVAE", **VAE)[0],
            start_image=picture(branch),
            **SIZE,
            **extra,
        )
        return sample(branch, shifted(branch, name), (node[0], node[1]), node[2])

    case.__name__ = f"image_to_video_{name}_{'with' if embeds else 'without'}_embeds"
    return case


def first_last_frame(branch: Branch) -> Link:
    conditioning = text(branch, DIM)
    node = branch.add(
        "WanFirstLastFrameToVideo",
        positive=conditioning[0],
        negative=conditioning[1],
        vae=branch.add("SPTestVAE", **VAE)[0],
        start_image=picture(branch),
        end_image=picture(branch, seed=6),
        clip_vision_start_image=branch.add("SPTestClipVision", tokens=257, seed=4)[0],
        clip_vision_end_image=branch.add("SPTestClipVision", tokens=257, seed=5)[0],
        **SIZE,
    )
    return sample(branch, shifted(branch, "tiny_wan_flf"), (node[0], node[1]), node[2])


def reference_latent(branch: Branch) -> Link:
    reference = latent(branch, "1,16,1,10,14", scale=1.0, seed=8)
    conditioning = tuple(branch.add("ReferenceLatent", conditioning=c, latent=reference)[0] for c in text(branch, DIM))
    return sample(branch, shifted(branch, "tiny_wan_ref"), conditioning, latent(branch, "1,16,5,10,14"))  # type: ignore[arg-type]


def subjects_behind_the_video(branch: Branch) -> Link:
    """Phantom: pictures joined to the video along time."""
    conditioning = text(branch, DIM)
    node = branch.add(
        "WanPhantomSubjectToVideo",
        positive=conditioning[0],
        negative=conditioning[1],
        vae=branch.add("SPTestVAE", **VAE)[0],
        images=picture(branch, frames=2),
        **SIZE,
    )
    return sample(branch, shifted(branch, "tiny_wan_t2v"), (node[0], node[1]), node[3])


def in_context_latents(branch: Branch) -> Link:
    """Bernini: whole videos and pictures of other sizes as further tokens."""
    conditioning = text(branch, DIM)
    node = branch.add(
        "BerniniConditioning",
        positive=conditioning[0],
        negative=conditioning[1],
        vae=branch.add("SPTestVAE", **VAE)[0],
        source_video=picture(branch, frames=5),
        reference_video=branch.add("SPTestImage", frames=1, height=48, width=64, seed=9)[0],
        ref_max_size=64,
        **SIZE,
    )
    return sample(branch, shifted(branch, "tiny_wan_t2v"), (node[0], node[1]), node[2])


def frame_timesteps(name: str, start: Callable[[Branch], Link]) -> Case:
    """Wan 2.2 5B: frames that are kept have a timestep of their own."""

    def case(branch: Branch) -> Link:
        return sample(branch, shifted(branch, "tiny_wan22_5b"), text(branch, DIM), start(branch))

    case.__name__ = f"frame_timesteps_{name}"
    return case


def _first_frame_kept(branch: Branch) -> Link:
    vae = branch.add("SPTestVAE", channels=48, time_stride=4, stride=16)[0]
    return branch.add("Wan22ImageToVideoLatent", vae=vae, width=224, height=160, length=17, batch_size=1, start_image=picture(branch))[0]


def two_videos_with_a_ramp(branch: Branch) -> Link:
    return latent(branch, "2,48,5,10,14", scale=1.0, mask="ramp")


CASES: list[Case] = [
    text_to_video,
    text_to_video_without_guidance,
    two_videos_of_odd_size,
    fewer_tokens_than_usual,
    image_to_video("tiny_wan_i2v", embeds=True),
    image_to_video("tiny_wan_i2v", embeds=False),
    image_to_video("tiny_wan22_i2v", embeds=False),
    first_last_frame,
    reference_latent,
    subjects_behind_the_video,
    in_context_latents,
    frame_timesteps("first_frame_kept", _first_frame_kept),
    frame_timesteps("ramp", two_videos_with_a_ramp),
    frame_timesteps("corner", lambda branch: latent(branch, "1,48,3,10,14", scale=1.0, mask="corner")),
    frame_timesteps("odd_size", lambda branch: latent(branch, "1,48,3,9,5", scale=1.0, mask="ramp")),
]


def on_devices() -> list[Any]:
    """On four workers one has no head and neither tokens nor frames divide, so they get every case. A campaign adds two and three."""
    some = [text_to_video, two_videos_of_odd_size, fewer_tokens_than_usual, first_last_frame, in_context_latents, CASES[-2], CASES[-4]]
    chosen = [("cpu:2", some, pytest.mark.campaign), ("cpu:3", some, pytest.mark.campaign), ("cpu:4", CASES, ())]
    return [pytest.param(devices, case, id=f"{devices}-{case.__name__}", marks=marks) for devices, cases, marks in chosen for case in cases]


@pytest.mark.parametrize(("devices", "case"), on_devices())
def test_same_as_stock(server: ComfyServer, devices: str, case: Case, require: Callable[[Case], None]) -> None:
    require(case)
    comparison = compare(server, case, devices, cfg_split=1)
    assert "CFG" not in comparison.decision
