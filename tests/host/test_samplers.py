"""Every way to sample, and every kind of node before and behind SP Model Patch that may stand there."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from campaign import on_devices
from host.graphs import SETTINGS, Branch, Case, Link, compare, latent, load, relative, run_sp, sample, text

from sp_core.demo.comfy_server import ComfyServer

DEVICES = "cpu:2"
SHAPE = "1,16,3,10,14"  # 105 tokens


def words(branch: Branch) -> tuple[Link, Link]:
    return text(branch, 4096)


def model(branch: Branch) -> Link:
    return branch.patch(branch.add("ModelSamplingSD3", model=load(branch, "tiny_wan_t2v"), shift=8.0)[0])


def custom_parts(branch: Branch, wire: Link, sampler: str = "euler") -> tuple[Link, Link]:
    sigmas = branch.add("BasicScheduler", model=wire, scheduler="simple", steps=2, denoise=1.0)
    return branch.add("KSamplerSelect", sampler_name=sampler)[0], sigmas[0]


def ksampler_with_new_noise_each_step(branch: Branch) -> Link:
    return sample(branch, model(branch), words(branch), latent(branch, SHAPE), sampler_name="euler_ancestral", steps=3)


def ksampler_from_a_video(branch: Branch) -> Link:
    return sample(branch, model(branch), words(branch), latent(branch, SHAPE, scale=1.0), denoise=0.6, scheduler="karras")


def sampler_custom(branch: Branch) -> Link:
    wire, (positive, negative) = model(branch), words(branch)
    sampler, sigmas = custom_parts(branch, wire, "dpmpp_2m")
    settings = {"add_noise": True, "noise_seed": 3, "cfg": 3.0, "sampler": sampler, "sigmas": sigmas}
    return branch.add("SamplerCustom", model=wire, positive=positive, negative=negative, latent_image=latent(branch, SHAPE), **settings)[0]


def advanced(branch: Branch, wire: Link, guider: Link) -> Link:
    sampler, sigmas = custom_parts(branch, wire)
    noise = branch.add("RandomNoise", noise_seed=4)[0]
    start = latent(branch, SHAPE)
    return branch.add("SamplerCustomAdvanced", noise=noise, guider=guider, sampler=sampler, sigmas=sigmas, latent_image=start)[0]


def cfg_guider(branch: Branch) -> Link:
    wire, (positive, negative) = model(branch), words(branch)
    return advanced(branch, wire, branch.add("CFGGuider", model=wire, positive=positive, negative=negative, cfg=5.0)[0])


def basic_guider(branch: Branch) -> Link:
    wire = model(branch)
    return advanced(branch, wire, branch.add("BasicGuider", model=wire, conditioning=words(branch)[0])[0])


def dual_cfg_guider(branch: Branch) -> Link:
    wire, (first, negative) = model(branch), words(branch)
    second = branch.add("SPTestConditioning", seed=9, tokens=5, dim=4096)[0]  # of another length: not batched with the first
    scales = {"cfg_conds": 4.0, "cfg_cond2_negative": 3.0, "style": "regular"}
    return advanced(branch, wire, branch.add("DualCFGGuider", model=wire, cond1=first, cond2=second, negative=negative, **scales)[0])


def inpainting(branch: Branch) -> Link:
    return sample(branch, model(branch), words(branch), latent(branch, SHAPE, scale=1.0, mask="corner"), denoise=0.8)


def high_and_low(branch: Branch, seed: int = 7) -> Link:
    """Wan 2.2: one checkpoint for the noisy steps, one of equal shapes for the others."""
    positive, negative = words(branch)
    start = latent(branch, SHAPE)
    for name, first, last, more in (("tiny_wan_t2v", 0, 2, "enable"), ("tiny_wan_t2v_low", 2, 10000, "disable")):
        wire = branch.patch(branch.add("ModelSamplingSD3", model=load(branch, name), shift=8.0)[0])
        start = branch.add(
            "KSamplerAdvanced",
            model=wire,
            add_noise="enable" if first == 0 else "disable",
            noise_seed=seed,
            steps=4,
            cfg=3.5,
            sampler_name="euler",
            scheduler="simple",
            positive=positive,
            negative=negative,
            latent_image=start,
            start_at_step=first,
            end_at_step=last,
            return_with_leftover_noise=more,
        )[0]
    return start


def lora(branch: Branch) -> Link:
    return sample(branch, branch.patch(with_lora(branch, 0.8)), words(branch), latent(branch, SHAPE))


def with_lora(branch: Branch, strength: float | None) -> Link:
    wire = load(branch, "tiny_wan_t2v")
    if strength is None:
        return wire
    return branch.add("LoraLoaderModelOnly", model=wire, lora_name="tiny_wan_lora.safetensors", strength_model=strength)[0]


def merge_of_two(branch: Branch) -> Link:
    """Two loaders lead to one MODEL."""
    parts = {"model1": load(branch, "tiny_wan_t2v"), "model2": load(branch, "tiny_wan_t2v_low")}
    merged = branch.add("ModelMergeSimple", ratio=0.3, **parts)[0]
    return sample(branch, branch.patch(merged), words(branch), latent(branch, SHAPE))


def model_sampling_behind(branch: Branch) -> Link:
    wire = branch.add("ModelSamplingSD3", model=branch.patch(load(branch, "tiny_wan_t2v")), shift=5.0)[0]
    return sample(branch, wire, words(branch), latent(branch, SHAPE))


def cfg_function_behind(branch: Branch) -> Link:
    return sample(branch, branch.add("SPTestCfgFunction", model=model(branch))[0], words(branch), latent(branch, SHAPE))


def cfg_function_before(branch: Branch) -> Link:
    wire = branch.patch(branch.add("SPTestCfgFunction", model=load(branch, "tiny_wan_t2v"))[0])
    return sample(branch, wire, words(branch), latent(branch, SHAPE))


def rescaled_cfg_before(branch: Branch) -> Link:
    wire = branch.patch(branch.add("RescaleCFG", model=load(branch, "tiny_wan_t2v"), multiplier=0.7)[0])
    return sample(branch, wire, words(branch), latent(branch, SHAPE))


def rope_scaled(branch: Branch) -> Link:
    """Plain options that the model reads in its forward."""
    scales = {"scale_x": 1.5, "shift_x": 1.0, "scale_y": 1.0, "shift_y": 0.0, "scale_t": 0.5, "shift_t": 2.0}
    wire = branch.add("ScaleROPE", model=branch.patch(load(branch, "tiny_wan_t2v")), **scales)[0]
    return sample(branch, wire, words(branch), latent(branch, SHAPE))


CASES: list[Case] = [
    ksampler_with_new_noise_each_step,
    ksampler_from_a_video,
    sampler_custom,
    cfg_guider,
    basic_guider,
    dual_cfg_guider,
    inpainting,
    lora,
    merge_of_two,
    model_sampling_behind,
    cfg_function_before,
    cfg_function_behind,
    rescaled_cfg_before,
    rope_scaled,
]


@pytest.mark.parametrize("devices", on_devices())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_same_as_stock(server: ComfyServer, case: Case, devices: str, require: Callable[[Case], None]) -> None:
    require(case)
    compare(server, case, devices)


@pytest.mark.parametrize("devices", on_devices())
@pytest.mark.parametrize("patched", [False, True], ids=["it_patches", "patched_already"])
def test_sp_sampler(server: ComfyServer, patched: bool, devices: str) -> None:
    def sp_sampler(branch: Branch) -> Link:
        wire = branch.add("ModelSamplingSD3", model=load(branch, "tiny_wan_t2v"), shift=8.0)[0]
        conditioning, start = words(branch), latent(branch, SHAPE)
        if branch.devices is None:
            return sample(branch, wire, conditioning, start)
        node = branch.add(
            "SPSampler",
            model=branch.patch(wire) if patched else wire,
            devices=devices,
            positive=conditioning[0],
            negative=conditioning[1],
            latent_image=start,
            **SETTINGS,
        )
        branch.report = node[1]
        return node[0]

    report = compare(server, sp_sampler, devices).sp.report
    for word in (f"{devices[-1]} devices: ", "exchange", "forwards", "sent"):
        assert word in report


def test_two_checkpoints_of_equal_shapes_queued_again_with_new_seeds(server: ComfyServer) -> None:
    pictures = []
    for seed in (7, 8, 9):

        def high_and_low_noise(branch: Branch, seed: int = seed) -> Link:
            return high_and_low(branch, seed)

        pictures.append(compare(server, high_and_low_noise, DEVICES).stock.parts[0])
        if seed == 7:
            loads = _loads(server)
    assert relative(pictures[0], pictures[1]) > 0.1
    assert _loads(server) == loads, "queueing again with a new seed ran the graph in the workers again"

    def high_noise_only(branch: Branch) -> Link:
        return sample(branch, model(branch), words(branch), latent(branch, SHAPE), seed=7, steps=4, cfg=3.5)

    # and the two are two: sampling everything with the first gives another picture
    assert relative(compare(server, high_noise_only, DEVICES).sp.parts[0], pictures[0]) > 0.01


def _loads(server: ComfyServer) -> int:
    return len(re.findall(r"in 2 workers after", server.log()))


def test_lora_added_strength_changed_removed(server: ComfyServer) -> None:
    seen = {}
    for strength in (None, 0.8, -0.5, None):

        def with_strength(branch: Branch, strength: float | None = strength) -> Link:
            return sample(branch, branch.patch(with_lora(branch, strength)), words(branch), latent(branch, SHAPE))

        picture = compare(server, with_strength, DEVICES).sp.parts[0]
        seen.setdefault(strength, picture)
        assert relative(picture, seen[strength]) <= 2e-5, "removing the LoRA did not undo it"
    assert relative(seen[0.8], seen[None]) > 0.01
    assert relative(seen[0.8], seen[-0.5]) > 0.01


def test_attention_override_stays_in_charge(server: ComfyServer) -> None:
    def override_before(branch: Branch) -> Link:
        wire = branch.add("SPTestAttentionOverride", model=load(branch, "tiny_wan_t2v"))[0]
        return sample(branch, branch.patch(wire), words(branch), latent(branch, SHAPE))

    def without(branch: Branch) -> Link:
        return sample(branch, branch.patch(load(branch, "tiny_wan_t2v")), words(branch), latent(branch, SHAPE))

    with_override = compare(server, override_before, DEVICES).sp.parts[0]
    assert relative(with_override, compare(server, without, DEVICES).sp.parts[0]) > 1e-3


def test_attention_override_on_audio_and_video(server: ComfyServer) -> None:
    """Guide masks and video-to-audio attention go through the user's function too."""

    def override_av(branch: Branch) -> Link:
        positive, negative = text(branch, 48, 16, frame_rate=25.0)
        node = branch.add(
            "LTXVAddGuide",
            positive=positive,
            negative=negative,
            vae=branch.add("SPTestVAE", channels=128, time_stride=8, stride=32)[0],
            latent=latent(branch, "1,128,3,5,7"),
            image=branch.add("SPTestImage", frames=1, height=160, width=224, seed=3)[0],
            frame_idx=0,
            strength=0.6,
        )
        start = branch.add("LTXVConcatAVLatent", video_latent=node[2], audio_latent=latent(branch, "1,8,13,16"))[0]
        wire = branch.patch(branch.add("SPTestAttentionOverride", model=load(branch, "tiny_ltxav"))[0])
        return sample(branch, wire, (node[0], node[1]), start)

    compare(server, override_av, DEVICES)


def test_cache_nodes_skip_steps_behind_it(server: ComfyServer) -> None:
    def easy_cache(branch: Branch) -> Link:
        settings = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": True}
        wire = branch.add("EasyCache", model=model(branch), **settings)[0]
        return sample(branch, wire, words(branch), latent(branch, SHAPE), steps=6, cfg=1.0)

    report = compare(server, easy_cache, DEVICES).sp.report
    forwards = int(re.search(r"forwards: (\d+)", report)[1])  # type: ignore[index]
    assert 0 < forwards < 6, report


def test_one_device_leaves_the_model_alone(server: ComfyServer) -> None:
    def one_device(branch: Branch) -> Link:
        return sample(branch, model(branch), words(branch), latent(branch, SHAPE))

    before = len(server.log())
    run_sp(server, one_device, "cpu:1")
    assert "in 2 workers after" not in server.log(before)
    assert "nothing to share" in server.log(before)
