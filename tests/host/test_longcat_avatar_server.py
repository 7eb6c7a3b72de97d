"""LongCat-Video-Avatar in a real server: stock loader, audio, persons, continuation, the host's guider of three branches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import parameters
from distributed.avatar_ranks import FIXTURE
from distributed.sparse_ranks import reference as sparse_reference
from host.graphs import Branch, Case, Link, compare, load, run_sp, text
from safetensors.torch import save_file

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DIM = 20
WIDTH, HEIGHT = 176, 96


@pytest.fixture(scope="module", autouse=True)
def files(base: Path) -> None:
    folder = base / "models" / "diffusion_models"
    shutil.copy(FIXTURE, folder / "longcat_avatar.safetensors")
    save_file(
        {key[len("model.") :]: value for key, value in sparse_reference().items() if key.startswith("model.")},
        folder / "longcat_sparse.safetensors",
    )


def voice(branch: Branch, seed: int) -> Link:
    return branch.add("SPTestLongCatVoice", moments=70, seed=seed)[0]


def picture(branch: Branch, frames: int = 1) -> Link:
    return branch.add("SPTestImage", frames=frames, height=HEIGHT, width=WIDTH, seed=3)[0]


def persons(branch: Branch) -> dict[str, Link]:
    """The left half is person 1, the top right person 2: what is neither is background."""
    left = branch.add("SPTestMask", frames=1, height=HEIGHT, width=WIDTH, right=0.0)[0]
    small = branch.add("SolidMask", value=1.0, width=64, height=48)[0]
    blank = branch.add("SolidMask", value=0.0, width=WIDTH, height=HEIGHT)[0]
    right = branch.add("MaskComposite", destination=blank, source=small, x=112, y=0, operation="add")[0]
    return {"audio_2": voice(branch, 12), "mask_1": left, "mask_2": right}


def sampled(branch: Branch, model: Link, scales: tuple[float, float] = (4.0, 3.0), schedule: str = "base", **piece: Any) -> Link:
    positive, negative = text(branch, DIM)
    vae = branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0]
    size = {"width": WIDTH, "height": HEIGHT, "length": 17}
    made = branch.add("SPLongCatAvatar", positive=positive, negative=negative, vae=vae, audio_1=voice(branch, 11), **size, **piece)
    guider = branch.add(
        "DualCFGGuider",
        model=model,
        cond1=made[0],
        cond2=made[1],
        negative=made[2],
        cfg_conds=scales[0],
        cfg_cond2_negative=scales[1],
        style="regular",
    )[0]
    steps = 8 if schedule == "avatar_distill" else 3
    sigmas = branch.add("SPLongCatSigmas", schedule=schedule, steps=steps, shift=7.0, refine_start=0.5)[0]
    sampler = branch.add("KSamplerSelect", sampler_name="euler")[0]
    noise = branch.add("RandomNoise", noise_seed=5)[0]
    return branch.add("SamplerCustomAdvanced", noise=noise, guider=guider, sampler=sampler, sigmas=sigmas, latent_image=made[3])[0]


def avatar(branch: Branch, cached: bool = False) -> Link:
    model = load(branch, "longcat_avatar")
    if cached:
        model = branch.add("SPLongCatKVCache", model=model, device="gpu")[0]
    return branch.patch(model)


def prompt_and_sound(branch: Branch) -> Link:
    return sampled(branch, avatar(branch))


def one_person(branch: Branch) -> Link:
    return sampled(branch, avatar(branch), image=picture(branch))


def one_person_distilled(branch: Branch) -> Link:
    return sampled(branch, avatar(branch), (1.0, 1.0), "avatar_distill", image=picture(branch))


def two_persons(branch: Branch) -> Link:
    return sampled(branch, avatar(branch), image=picture(branch), **persons(branch))


def going_on(branch: Branch, cached: bool = False, **more: Link) -> Link:
    so_far = {"previous_frames": picture(branch, 20), "conditioning_frames": 9, "reference_frame": 3, "hidden_around": 1}
    return sampled(branch, avatar(branch, cached), image=picture(branch), **so_far, **more, **persons(branch))


def going_on_cached(branch: Branch) -> Link:
    """Cached on several devices against stock without a cache; from what was sampled before, as Avatar 1.0 goes on."""
    before = branch.add("SPTestLatent", shapes=f"1,16,5,{HEIGHT // 8},{WIDTH // 8}", seed=9, scale=1.0)[0]
    return going_on(branch, cached=branch.devices is not None, previous_latent=before)


CASES = [
    one_person,
    # two persons, going on, and the cache at once; each by itself in a campaign
    going_on_cached,
    *(pytest.param(case, marks=pytest.mark.campaign) for case in (two_persons, going_on, prompt_and_sound, one_person_distilled)),
]


@pytest.fixture(scope="module", params=parameters(plain=["cpu:3"], campaign=["cpu:2"]))
def devices(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_same_as_on_one_device(server: ComfyServer, devices: str, case: Case) -> None:
    compare(server, case, devices)


def refined(branch: Branch) -> Link:
    """A small video, enlarged, with frames between: 9 x 6 x 11 tokens, of which no side divides by four but the second does not."""
    model = branch.add("SPLongCatBlockSparse", model=branch.patch(load(branch, "longcat_sparse")), sparsity=0.75)[0]
    vae = branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0]
    small = branch.add("SPTestImage", frames=17, height=48, width=88, seed=4)[0]
    latent = branch.add(
        "SPLongCatRefineLatent", vae=vae, video=small, width=WIDTH, height=HEIGHT, double_frames=True, start=picture(branch)
    )[0]
    sigmas = branch.add("SPLongCatSigmas", schedule="refine", steps=50, shift=12.0, refine_start=0.5)[0]
    positive, negative = text(branch, DIM)
    settings = {"add_noise": True, "noise_seed": 5, "cfg": 1.0, "positive": positive, "negative": negative}
    sampler = branch.add("KSamplerSelect", sampler_name="euler")[0]
    return branch.add("SamplerCustom", model=model, sampler=sampler, sigmas=sigmas, latent_image=latent, **settings)[0]


@pytest.mark.campaign
def test_refining_is_that_of_one_device(server: ComfyServer) -> None:
    compare(server, refined, "cpu:3")


def test_start_comes_out_as_it_went_in(server: ComfyServer) -> None:
    made = run_sp(server, one_person).parts[0]
    assert made.shape == (1, 16, 5, HEIGHT // 8, WIDTH // 8)
    pixels = run_sp(server, one_person_distilled).parts[0]
    torch.testing.assert_close(made[:, :, 0], pixels[:, :, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio_2": True}, "several voices need a mask for each person"),
        ({"mask_1": True}, "there is one voice"),
        ({"previous_frames": True}, "Connect the picture of its start to image"),
    ],
)
def test_what_does_not_fit_is_told(server: ComfyServer, changes: dict[str, bool], message: str) -> None:
    def case(branch: Branch) -> Link:
        makes = {
            "audio_2": lambda: voice(branch, 12),
            "mask_1": lambda: persons(branch)["mask_1"],
            "previous_frames": lambda: picture(branch, 20),
        }
        return sampled(branch, avatar(branch), **{name: makes[name]() for name in changes})

    with pytest.raises(PromptFailed, match=message):
        run_sp(server, case)


def test_block_sparse_is_for_the_base_model_only(server: ComfyServer) -> None:
    def case(branch: Branch) -> Link:
        return sampled(branch, branch.add("SPLongCatBlockSparse", model=avatar(branch), sparsity=0.9)[0])

    with pytest.raises(PromptFailed, match="works with LongCat-Video only, this model is LongCatAvatar"):
        run_sp(server, case)
