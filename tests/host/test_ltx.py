"""LTX-Video and LTX-2 / 2.3 / 2.4: guides, masks, guidance by perturbation, audio, on 2 to 4 workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from host.graphs import Branch, Case, Link, compare, latent, load, sample, text

from sp_core.demo.comfy_server import ComfyServer

#: 5 x 5 x 7 = 175 video tokens, which neither 2 nor 3 nor 4 divides
VIDEO = "1,128,5,5,7"
AUDIO = "1,8,13,16"
BOTH = f"{VIDEO};{AUDIO}"


def model(branch: Branch, name: str, *after: Callable[[Branch, Link], Link]) -> Link:
    """The patched model, and nodes behind SP Model Patch."""
    wire = branch.patch(load(branch, name))
    for node in after:
        wire = node(branch, wire)
    return wire


def words(branch: Branch, name: str) -> tuple[Link, Link]:
    """Text as the model's own encoder makes it: LTXV's comes with a mask, LTX 2.3's is as wide as both streams."""
    # connectors take whole multiples of their registers
    conditioning = text(branch, dim=192 if name in ("tiny_ltx23", "tiny_ltx24") else 48, tokens=16, frame_rate=25.0)
    if name.startswith("tiny_ltxv"):
        conditioning = tuple(branch.add("SPTestTextMask", conditioning=c, hidden=5)[0] for c in conditioning)  # type: ignore[assignment]
    return conditioning


def picture(branch: Branch, frames: int = 1, seed: int = 3) -> Link:
    return branch.add("SPTestImage", frames=frames, height=160, width=224, seed=seed)[0]


def vae(branch: Branch) -> Link:
    return branch.add("SPTestVAE", channels=128, time_stride=8, stride=32)[0]


def named(name: str, case: Case) -> Case:
    case.__name__ = name
    return case


def plain(name: str, start: str, label: str = "plain", **changes: Any) -> Case:
    return named(
        f"{name}_{label}", lambda branch: sample(branch, model(branch, name), words(branch, name), latent(branch, start), **changes)
    )


def with_mask(name: str, start: str, mask: str) -> Case:
    def case(branch: Branch) -> Link:
        return sample(branch, model(branch, name), words(branch, name), latent(branch, start, scale=1.0, mask=mask))

    return named(f"{name}_mask_{mask.replace(';', '_')}", case)


def image_to_video(branch: Branch) -> Link:
    """LTXV's own node: the first frame is kept in part."""
    positive, negative = words(branch, "tiny_ltxv")
    size = {"width": 224, "height": 160, "length": 33, "batch_size": 1, "strength": 0.8}
    node = branch.add("LTXVImgToVideo", positive=positive, negative=negative, vae=vae(branch), image=picture(branch), **size)
    return sample(branch, model(branch, "tiny_ltxv"), (node[0], node[1]), node[2])


def guides(name: str, label: str, settings: list[dict[str, Any]], *, audio: bool = False, mask: str = "", video: str = VIDEO) -> Case:
    """LTXVAddGuide once for each entry of ``settings``; the guides' frames stand behind the video's."""

    def case(branch: Branch) -> Link:
        positive, negative = words(branch, name)
        start = latent(branch, video, scale=1.0 if mask else 0.0, mask=mask)
        for number, setting in enumerate(settings):
            options = dict(setting)
            if options.pop("masked", False):
                options["attention_mask"] = branch.add("SPTestMask", frames=1, height=160, width=224, right=0.3)[0]
            image = picture(branch, options.pop("frames", 1), seed=20 + number)
            if factor := options.pop("downscale", 0):
                options["iclora_parameters"] = branch.add("SPTestDownscale", factor=factor)[0]
            node = branch.add("LTXVAddGuide", positive=positive, negative=negative, vae=vae(branch), latent=start, image=image, **options)
            positive, negative, start = node[0], node[1], node[2]
        if audio:
            start = branch.add("LTXVConcatAVLatent", video_latent=start, audio_latent=latent(branch, AUDIO))[0]
        return sample(branch, model(branch, name), (positive, negative), start)

    return named(f"{name}_guides_{label}", case)


def spatio_temporal_guidance(branch: Branch, wire: Link) -> Link:
    return branch.add("LTXVSpatioTemporalGuidance", model=wire, scale=1.5, blocks="0, 2", start_percent=0.0, end_percent=1.0)[0]


def modality_guidance(branch: Branch, wire: Link) -> Link:
    return branch.add("LTXVModalityGuidance", model=wire, modality_scale=3.0, start_percent=0.0, end_percent=1.0)[0]


def options(**values: Any) -> Callable[[Branch, Link], Link]:
    return lambda branch, wire: branch.add("SPTestModelOption", model=wire, options=json.dumps(values))[0]


def guided(name: str, label: str, *after: Callable[[Branch, Link], Link], **changes: Any) -> Case:
    return named(
        f"{name}_{label}", lambda branch: sample(branch, model(branch, name, *after), words(branch, name), latent(branch, BOTH), **changes)
    )


def both_guidances_before(branch: Branch) -> Link:
    name = "tiny_ltxav"
    wire = branch.patch(modality_guidance(branch, spatio_temporal_guidance(branch, load(branch, name))))
    return sample(branch, wire, words(branch, name), latent(branch, BOTH), cfg=1.0)


def reference_audio(branch: Branch) -> Link:
    positive, negative = words(branch, "tiny_ltxav")
    node = branch.add(
        "LTXVReferenceAudio",
        model=model(branch, "tiny_ltxav"),
        positive=positive,
        negative=negative,
        reference_audio=branch.add("SPTestAudio", samples=6400, seed=2)[0],
        audio_vae=branch.add("SPTestAudioVAE")[0],
        identity_guidance_scale=2.0,
        start_percent=0.0,
        end_percent=1.0,
    )
    return sample(branch, node[0], (node[1], node[2]), latent(branch, BOTH))


def dual_guidance(branch: Branch) -> Link:
    """Scales of their own for video and audio; the host's guider and scheduler."""
    positive, negative = words(branch, "tiny_ltxav")
    guider = branch.add(
        "LTXVDualCFGGuider", model=model(branch, "tiny_ltxav"), positive=positive, negative=negative, video_cfg=3.0, audio_cfg=7.0
    )
    start = latent(branch, BOTH)
    sigmas = branch.add("LTXVScheduler", steps=2, max_shift=2.05, base_shift=0.95, stretch=True, terminal=0.1)
    sampler = branch.add("KSamplerSelect", sampler_name="euler")
    noise = branch.add("RandomNoise", noise_seed=4)
    return branch.add("SamplerCustomAdvanced", noise=noise[0], guider=guider[0], sampler=sampler[0], sigmas=sigmas[0], latent_image=start)[
        0
    ]


def generated_keyframes(branch: Branch) -> Link:
    """LTX 2.4: a marker is added to the tokens of single-picture frames."""
    start = latent(branch, BOTH)
    marked = [branch.add("SPTestKeyframeSlots", conditioning=c, latent=start, first=2, count=2)[0] for c in words(branch, "tiny_ltx24")]
    return sample(branch, model(branch, "tiny_ltx24"), (marked[0], marked[1]), start)


ONE = [{"frame_idx": 0, "strength": 1.0}]
STRENGTHS = [{"frame_idx": 0, "strength": 0.6}, {"frame_idx": 16, "strength": 1.0}]
AMPLIFIED = [{"frame_idx": 0, "strength": 0.6}, {"frame_idx": -1, "strength": 2.5}]
#: half as wide and high as the video: three of four of their places are no tokens
SMALL = [{"frame_idx": 0, "strength": 1.0, "downscale": 2}, {"frame_idx": 8, "strength": 0.5, "downscale": 2}]
HALVABLE = "1,128,5,4,6"
MASKED = [{"frame_idx": 8, "strength": 0.7, "masked": True, "frames": 9}, {"frame_idx": 0, "strength": 1.0}]

CASES: list[Case] = [
    plain("tiny_ltxv", VIDEO),
    plain("tiny_ltxv", "2,128,3,5,7", label="two_videos", cfg=1.0),
    plain("tiny_ltxv", "1,128,1,1,3", label="three_tokens"),
    plain("tiny_ltxv_adaln", VIDEO),
    image_to_video,
    with_mask("tiny_ltxv", VIDEO, "corner"),
    with_mask("tiny_ltxv", VIDEO, "ramp"),
    guides("tiny_ltxv", "one", ONE),
    guides("tiny_ltxv", "strengths", STRENGTHS),
    guides("tiny_ltxv", "amplified", AMPLIFIED),
    guides("tiny_ltxv", "masked", MASKED),
    guides("tiny_ltxv", "small", SMALL, video=HALVABLE),
    guides("tiny_ltxv_adaln", "strengths", STRENGTHS, mask="corner"),
    plain("tiny_ltxav", BOTH),
    plain("tiny_ltxav", "2,128,3,5,7;2,8,13,16", label="two_videos", cfg=1.0),
    plain("tiny_ltxav", VIDEO, label="no_audio"),
    plain("tiny_ltxav", "1,128,1,1,3;1,8,5,16", label="three_tokens"),
    with_mask("tiny_ltxav", BOTH, "first_frame"),
    with_mask("tiny_ltxav", BOTH, "corner;ramp"),
    with_mask("tiny_ltxav", BOTH, "none;"),
    with_mask("tiny_ltxav", BOTH, "ramp;none"),
    guides("tiny_ltxav", "strengths", STRENGTHS, audio=True),
    guides("tiny_ltxav", "amplified", AMPLIFIED, audio=True),
    guides("tiny_ltxav", "masked", MASKED, audio=True, mask="corner"),
    guided("tiny_ltxav", "spatio_temporal_guidance", spatio_temporal_guidance),
    guided("tiny_ltxav", "modality_guidance", modality_guidance),
    guided("tiny_ltxav", "both_guidances", spatio_temporal_guidance, modality_guidance, cfg=1.0),
    both_guidances_before,
    guided("tiny_ltxav", "video_switched_off", options(run_vx=False)),
    guided("tiny_ltxav", "audio_switched_off", options(run_ax=False)),
    guided("tiny_ltxav", "one_direction", options(a2v_cross_attn=False)),
    guided("tiny_ltxav", "other_direction", options(v2a_cross_attn=False)),
    reference_audio,
    dual_guidance,
    plain("tiny_ltx23", BOTH),
    with_mask("tiny_ltx23", BOTH, "corner;ramp"),
    guides("tiny_ltx23", "strengths", STRENGTHS, audio=True),
    guides("tiny_ltx23", "small", SMALL, audio=True, video=HALVABLE),
    guides("tiny_ltx23", "masked", MASKED, audio=True, mask="ramp"),
    guided("tiny_ltx23", "both_guidances", spatio_temporal_guidance, modality_guidance),
    generated_keyframes,
]


def on_devices() -> list[Any]:
    """On three workers nothing divides, neither tokens nor heads, so they get every case. A campaign adds two and four."""
    few = ("plain", "guides_masked", "guides_small", "mask_corner_ramp", "both_guidances", "three_tokens")
    some = [case for case in CASES if case.__name__.endswith(few)]
    chosen = [("cpu:2", some, pytest.mark.campaign), ("cpu:3", CASES, ()), ("cpu:4", some, pytest.mark.campaign)]
    return [pytest.param(devices, case, id=f"{devices}-{case.__name__}", marks=marks) for devices, cases, marks in chosen for case in cases]


@pytest.mark.parametrize(("devices", "case"), on_devices())
def test_same_as_stock(server: ComfyServer, devices: str, case: Case, require: Callable[[Case], None]) -> None:
    require(case)
    comparison = compare(server, case, devices, cfg_split=1)
    assert "CFG" not in comparison.decision
