"""Models built on Wan, each with the host's own conditioning nodes, on 2 to 4 workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign import on_devices
from host.family_checkpoints import write_families
from host.graphs import Branch, Case, Link, compare, latent, load, sample, text

from sp_core.demo.comfy_server import ComfyServer

DIM = 4096
#: 80 x 112 pixels are 5 x 7 tokens a frame; 9 frames are 3 latent ones: 105 tokens, which neither 2 nor 4 divides
SIZE = {"width": 112, "height": 80, "length": 9, "batch_size": 1}
VAE = {"channels": 16, "time_stride": 4, "stride": 8}
NAMES = ["tiny_vace", "tiny_camera", "tiny_camera22", "tiny_fun_control", "tiny_s2v", "tiny_humo", "tiny_animate", "tiny_scail"]


@pytest.fixture(scope="module", autouse=True)
def checkpoints(comfyui: Path, base: Path) -> None:
    write_families(comfyui, base, NAMES)


@pytest.fixture(scope="module", params=on_devices())
def devices(request: pytest.FixtureRequest) -> str:
    return request.param


def vae(branch: Branch) -> Link:
    return branch.add("SPTestVAE", **VAE)[0]


def picture(branch: Branch, frames: int = 1, seed: int = 3) -> Link:
    return branch.add("SPTestImage", frames=frames, height=80, width=112, seed=seed)[0]


def vision(branch: Branch) -> Link:
    return branch.add("SPTestClipVision", tokens=257, seed=4)[0]


def with_tensors(branch: Branch, conditioning: tuple[Link, Link], **shapes: Any) -> tuple[Link, Link]:
    spec = json.dumps(shapes)
    return tuple(  # type: ignore[return-value]
        branch.add("SPTestConditioningTensors", conditioning=c, tensors=spec, seed=i)[0] for i, c in enumerate(conditioning)
    )


def conditioned(name: str, node: str, inputs: Callable[[Branch], dict[str, Any]], label: str, **tensors: Any) -> Case:
    """A conditioning node of the host, and a sampler on the model; ``inputs`` are the node's, beside the usual ones."""

    def case(branch: Branch) -> Link:
        positive, negative = with_tensors(branch, text(branch, DIM), **tensors) if tensors else text(branch, DIM)
        made = branch.add(node, positive=positive, negative=negative, vae=vae(branch), **{**SIZE, **inputs(branch)})
        return sample(branch, branch.patch(load(branch, name)), (made[0], made[1]), made[2])

    case.__name__ = f"{name}_{label}"
    return case


def vace_control(branch: Branch) -> dict[str, Any]:
    mask = branch.add("SPTestMask", frames=9, height=80, width=112, right=0.0)[0]
    return {"control_video": picture(branch, 9), "control_masks": mask, "reference_image": picture(branch, seed=5), "strength": 0.7}


def camera(branch: Branch) -> dict[str, Any]:
    path = branch.add("WanCameraEmbedding", camera_pose="Pan Up", width=112, height=80, length=9)[0]
    return {"start_image": picture(branch), "clip_vision_output": vision(branch), "camera_conditions": path}


def two_controls(branch: Branch) -> Link:
    """VACE twice: two control videos, each with a sequence of its own."""
    positive, negative = text(branch, DIM)
    for seed in (3, 4):
        made = branch.add(
            "WanVaceToVideo",
            positive=positive,
            negative=negative,
            vae=vae(branch),
            control_video=picture(branch, 9, seed),
            strength=0.8,
            **SIZE,
        )
        positive, negative = made[0], made[1]
    return sample(branch, branch.patch(load(branch, "tiny_vace")), (positive, negative), made[2])


def scail(branch: Branch) -> Link:
    """Pose video at half size behind the tokens, a reference picture before them."""
    shapes = {"pose_video_latent": [1, 16, 3, 6, 8], "reference_latents": [[1, 16, 1, 12, 16]]}
    conditioning = with_tensors(branch, text(branch, DIM), **shapes)
    return sample(branch, branch.patch(load(branch, "tiny_scail")), conditioning, latent(branch, "1,16,3,12,16"))


def humo_with_sound(branch: Branch) -> Link:
    """Sound in windows of eight, as the host's node makes it of an audio encoder's output."""
    positive, negative = text(branch, DIM)
    made = branch.add("WanHuMoImageToVideo", positive=positive, negative=negative, vae=vae(branch), ref_image=picture(branch), **SIZE)
    conditioning = with_tensors(branch, (made[0], made[1]), audio_embed=[1, 3, 8, 5, 1280])
    return sample(branch, branch.patch(load(branch, "tiny_humo")), conditioning, made[2])


SOUND = {"audio_embed": [1, 25, 1024, 12]}
CASES: list[Case] = [
    conditioned("tiny_vace", "WanVaceToVideo", lambda branch: {"strength": 1.0}, "plain"),
    conditioned("tiny_vace", "WanVaceToVideo", vace_control, "control"),
    two_controls,
    conditioned("tiny_camera", "WanCameraImageToVideo", camera, "path"),
    conditioned("tiny_camera22", "WanCameraImageToVideo", camera, "path"),
    conditioned(
        "tiny_fun_control",
        "WanFunControlToVideo",
        lambda branch: {"start_image": picture(branch), "control_video": picture(branch, 9, 5), "clip_vision_output": vision(branch)},
        "control",
    ),
    conditioned("tiny_s2v", "WanSoundImageToVideo", lambda branch: {}, "sound", **SOUND),
    conditioned(
        "tiny_s2v",
        "WanSoundImageToVideo",
        lambda branch: {"ref_image": picture(branch), "control_video": picture(branch, 9, 5), "ref_motion": picture(branch, 5, 6)},
        "sound_picture_motion",
        **SOUND,
    ),
    conditioned("tiny_humo", "WanHuMoImageToVideo", lambda branch: {"ref_image": picture(branch)}, "picture"),
    humo_with_sound,
    conditioned(
        "tiny_animate",
        "WanAnimateToVideo",
        lambda branch: {
            "reference_image": picture(branch),
            "pose_video": picture(branch, 9, 5),
            "clip_vision_output": vision(branch),
            "continue_motion_max_frames": 5,
            "video_frame_offset": 0,
        },
        "pose",
    ),
    scail,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_same_as_stock(server: ComfyServer, devices: str, case: Case, require: Callable[[Case], None]) -> None:
    require(case)
    compare(server, case, devices, cfg_split=1)


def test_a_face_moves_a_tile(server: ComfyServer, devices: str) -> None:
    """Animate's face adapter attends frame by frame; one short case, as the face encoder is as large as ever."""

    def face(branch: Branch) -> Link:
        positive, negative = text(branch, DIM)
        settings = {**SIZE, "length": 5, "continue_motion_max_frames": 5, "video_frame_offset": 0}
        made = branch.add(
            "WanAnimateToVideo", positive=positive, negative=negative, vae=vae(branch), face_video=picture(branch, 2, 6), **settings
        )
        return sample(branch, branch.patch(load(branch, "tiny_animate")), (made[0], made[1]), made[2], steps=1, cfg=1.0)

    assert "tiles" in compare(server, face, devices).sp.report
