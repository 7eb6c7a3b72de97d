"""LongCat-Video in a real server: stock loader, LongCat's nodes, SP Model Patch; on one device and on several."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import parameters
from distributed.longcat_ranks import FIXTURE
from host.graphs import SETTINGS, Branch, Case, Link, compare, load, run_sp, sample, text
from safetensors import safe_open
from safetensors.torch import save_file

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DIM = 64
LORA = "longcat_lora.safetensors"


@pytest.fixture(scope="module", autouse=True)
def files(base: Path) -> None:
    """The tiny checkpoint and an official-style LoRA for it, where the server looks."""
    shutil.copy(FIXTURE, base / "models" / "diffusion_models" / "longcat_tiny.safetensors")
    generator = torch.Generator().manual_seed(1)
    lora: dict[str, torch.Tensor] = {}
    with safe_open(str(FIXTURE), "pt") as checkpoint:
        for block in range(2):
            outs, ins = checkpoint.get_slice(f"model.blocks.{block}.attn.qkv.weight").get_shape()
            stem = f"lora___lorahyphen___blocks___lorahyphen___{block}___lorahyphen___attn___lorahyphen___qkv"
            lora[f"{stem}.lora_down.weight"] = torch.randn(12, ins, generator=generator) / ins**0.5
            lora |= {f"{stem}.lora_up.blocks.{part}.weight": torch.randn(outs // 3, 4, generator=generator) for part in range(3)}
            lora[f"{stem}.alpha_scale"] = torch.tensor(0.5)
    save_file(lora, base / "models" / "loras" / LORA)


def start(branch: Branch, frames: int = 0, conditioning_frames: int = 13, batch: int = 1) -> Link:
    """176 x 96 pixels are 6 x 11 tokens a frame; 17 frames are 5 latent ones."""
    video = {"video": branch.add("SPTestImage", frames=frames, height=96, width=176, seed=3)[0]} if frames else {}
    vae = branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0]
    size = {"width": 176, "height": 96, "length": 17, "batch_size": batch, "conditioning_frames": conditioning_frames}
    return branch.add("SPLongCatLatent", vae=vae, **size, **video)[0]


def sigmas(branch: Branch, **settings: Any) -> Link:
    return branch.add("SPLongCatSigmas", **{"schedule": "base", "steps": 3, "shift": 12.0, "refine_start": 0.5, **settings})[0]


def custom(branch: Branch, model: Link, latent: Link, schedule: Link) -> Link:
    """SamplerCustom, as LongCat's schedules need it."""
    positive, negative = text(branch, DIM)
    sampler = branch.add("KSamplerSelect", sampler_name="euler")[0]
    settings = {"add_noise": True, "noise_seed": SETTINGS["seed"], "cfg": 4.0, "positive": positive, "negative": negative}
    return branch.add("SamplerCustom", model=model, sampler=sampler, sigmas=schedule, latent_image=latent, **settings)[0]


def text_to_video(branch: Branch) -> Link:
    return sample(branch, branch.patch(load(branch, "longcat_tiny")), text(branch, DIM), start(branch))


def image_to_video(branch: Branch) -> Link:
    return sample(branch, branch.patch(load(branch, "longcat_tiny")), text(branch, DIM), start(branch, frames=1))


def continuation(branch: Branch) -> Link:
    """The last 9 of 20 frames go on, twice."""
    return custom(branch, branch.patch(load(branch, "longcat_tiny")), start(branch, 20, 9, batch=2), sigmas(branch, schedule="enhance_hf"))


def continuation_cached(branch: Branch) -> Link:
    """Cached on several devices against stock without a cache."""
    model = load(branch, "longcat_tiny")
    if branch.devices is not None:
        model = branch.add("SPLongCatKVCache", model=model, device="gpu")[0]
    return custom(branch, branch.patch(model), start(branch, 20, 9, batch=2), sigmas(branch, schedule="enhance_hf"))


def cfg_zero_and_lora(branch: Branch) -> Link:
    model = branch.add("LoraLoaderModelOnly", model=load(branch, "longcat_tiny"), lora_name=LORA, strength_model=0.8)[0]
    model = branch.add("SPLongCatCFGZero", model=branch.patch(model))[0]
    return custom(branch, model, start(branch, frames=1), sigmas(branch))


CASES = [text_to_video, image_to_video, continuation, continuation_cached, cfg_zero_and_lora]


@pytest.fixture(scope="module", params=parameters(plain=["cpu:3"], campaign=["cpu:2"]))
def devices(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_same_as_on_one_device(server: ComfyServer, devices: str, case: Case) -> None:
    compare(server, case, devices)


def test_conditioning_frames_come_out_as_they_went_in(server: ComfyServer) -> None:
    kept = run_sp(server, named("kept", lambda branch: start(branch, 20, 9))).parts[0]
    made = run_sp(server, continuation_cached).parts[0]
    assert made.shape == (2, 16, 5, 12, 22)
    torch.testing.assert_close(made[:1, :, :3], kept[:, :, :3], atol=1e-5, rtol=1e-5)


def named(name: str, build: Callable[[Branch], Link]) -> Case:
    build.__name__ = name
    return build


def two_runs_with_other_weights(branch: Branch) -> Link:
    """Same frames, same loader, another LoRA strength. The cache is behind SP Model Patch: the workers know the option alone."""
    made = []
    for strength in (1.0, -1.0):
        model = branch.add("LoraLoaderModelOnly", model=load(branch, "longcat_tiny"), lora_name=LORA, strength_model=strength)[0]
        model = branch.add("SPLongCatKVCache", model=branch.patch(model), device="cpu")[0]
        made.append(custom(branch, model, start(branch, 20, 9), sigmas(branch)))
    return branch.add("LatentAdd", samples1=made[0], samples2=made[1])[0]


def test_cache_does_not_outlive_a_sampling_run(server: ComfyServer) -> None:
    """In one prompt both models share the loader's weights, so keys that were kept would belong to the other LoRA."""
    compare(server, two_runs_with_other_weights, "cpu:2")


def test_cache_is_for_longcat_only(server: ComfyServer) -> None:
    def case(branch: Branch) -> Link:
        model = branch.add("SPLongCatKVCache", model=load(branch, "tiny_wan_t2v"), device="gpu")[0]
        return sample(branch, branch.patch(model), text(branch, 4096), start(branch))

    with pytest.raises(PromptFailed, match="works with LongCat-Video only, this model is WAN21"):
        run_sp(server, case)


def test_nothing_left_to_make_is_told(server: ComfyServer) -> None:
    def case(branch: Branch) -> Link:
        return start(branch, frames=20, conditioning_frames=17)

    with pytest.raises(PromptFailed, match="17 conditioning frames leave nothing of a video of 17"):
        run_sp(server, case)


def test_nodes_explain_every_input(server: ComfyServer) -> None:
    for name in ("SPLongCatSigmas", "SPLongCatLatent", "SPLongCatCFGZero", "SPLongCatKVCache"):
        node = server.get(f"/object_info/{name}")[name]
        for inputs in node["input"].values():
            for name, (_, options) in inputs.items():
                assert options["tooltip"], name
