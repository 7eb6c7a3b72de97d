"""Picture models and further video models through ComfyUI's own model classes: each equal to stock in one prompt.

The models are those of host/families.py, made by a node of the tests: ComfyUI detects their real widths only, which are too large here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import campaign
import pytest
from campaign import on_devices
from host.families import FAMILIES
from host.graphs import Branch, Case, Link, compare, latent, run_sp, sample, text

from sp_core.demo.comfy_server import ComfyServer, PromptFailed


@dataclass(frozen=True)
class Model:
    """How one of the families is made and sampled."""

    family: str
    #: class of comfy.supported_models
    kind: str
    latent: str
    dim: int = 24
    #: of SPTestConditioningTensors: {"pooled_output": [1, 20]}
    tensors: dict[str, Any] = field(default_factory=dict)
    text_mask: int = 0
    #: node that changes each conditioning, and its inputs
    node: tuple[str, dict[str, Any]] | None = None
    #: settings of the sampler
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def load(self, branch: Branch) -> Link:
        arguments = {**FAMILIES[self.family].arguments, **self.arguments}
        return branch.add("SPTestTinyModel", kind=self.kind, arguments=json.dumps(arguments), seed=3)[0]

    def conditioning(self, branch: Branch) -> tuple[Link, Link]:
        wires = []
        for seed, wire in enumerate(text(branch, self.dim), start=5):
            if self.tensors:
                wire = branch.add("SPTestConditioningTensors", conditioning=wire, tensors=json.dumps(self.tensors), seed=seed)[0]
            if self.text_mask:
                wire = branch.add("SPTestTextMask", conditioning=wire, hidden=self.text_mask)[0]
            if self.node is not None:
                wire = branch.add(self.node[0], conditioning=wire, **self.node[1])[0]
            wires.append(wire)
        return wires[0], wires[1]


_POOLED = {"pooled_output": [1, 20]}
_REFERENCES = {"reference_latents": [[1, 16, 6, 10], [1, 16, 4, 4]]}
_MT5 = {"attention_mask": [1, 7], "conditioning_mt5xl": [1, 6, 32], "attention_mask_mt5xl": [1, 6]}
_CLEAN = ("FluxKontextMultiReferenceLatentMethod", {"reference_latents_method": "index_timestep_zero"})
MODELS = {
    "flux_with_references": Model("Flux", "Flux", "1,16,9,13", tensors={**_POOLED, **_REFERENCES}),
    "qwen_image_edit": Model("Qwen-Image", "QwenImage", "1,16,1,9,13", tensors={"reference_latents": [[1, 16, 1, 6, 10]]}, node=_CLEAN),
    "z_image": Model("Z-Image", "ZImage", "1,16,9,13"),
    "sd3": Model("Stable Diffusion 3.5 medium", "SD3", "1,16,9,13", tensors=_POOLED),
    "cogvideox": Model("CogVideoX", "CogVideoX_T2V", "1,16,3,10,14"),
    "cosmos_predict2": Model("Cosmos Predict 2", "CosmosT2IPredict2", "1,16,1,10,14"),
    "mochi": Model("Mochi", "GenmoMochi", "1,12,3,10,14", text_mask=2),
    "chroma": Model("Chroma", "Chroma", "1,16,9,13"),
    "flux": Model("Flux", "Flux", "2,16,9,13", tensors=_POOLED),
    "flux2": Model(
        "Flux 2",
        "Flux2",
        "1,128,5,7",
        tensors={"reference_latents": [[1, 128, 3, 5]]},
        arguments={"in_channels": 128, "out_channels": 128},
    ),
    "qwen_image_with_a_mask": Model("Qwen-Image", "QwenImage", "1,16,1,9,13", text_mask=2),
    "lumina2": Model("Lumina 2", "Lumina2", "1,16,9,13"),
    "hidream": Model("HiDream", "HiDream", "1,16,9,13", tensors={**_POOLED, "conditioning_llama3": [1, 2, 5, 20]}),
    "aura_flow": Model("AuraFlow", "AuraFlow", "1,4,9,13"),
    "joy_image": Model("JoyImage", "JoyImage", "1,16,1,9,13"),
    "krea2": Model("Krea 2", "Krea2", "1,16,9,13"),
    "ideogram4": Model("Ideogram 4", "Ideogram4", "1,128,5,7", arguments={"in_channels": 128}),
    "wan_animate2": Model(
        "Wan Animate 2",
        "WAN_Animate2",
        "1,16,4,10,14",
        tensors={"pose_video_latent": [1, 16, 3, 10, 14], "cross_attn_pose": [1, 5, 24]},
    ),
    "seedvr2": Model("SeedVR2", "SeedVR2", "1,16,3,10,14", tensors={"condition": [1, 17, 3, 10, 14]}),
    "cosmos1": Model("Cosmos 1", "CosmosT2V", "1,16,3,10,14"),
    "pixart": Model("PixArt", "PixArtAlpha", "1,4,34,38"),
    "ernie_image": Model("ErnieImage", "ErnieImage", "1,128,5,7", arguments={"in_channels": 128, "out_channels": 128}),
    "hunyuan_dit": Model("Hunyuan DiT", "HunyuanDiT", "1,4,10,14", tensors=_MT5),
    "pixel_dit": Model("PixelDiT", "PixelDiTT2I", "1,3,20,28"),
    "wandancer": Model("WanDancer", "WAN22_WanDancer", "1,16,3,16,16", tensors={"audio_embed": [1, 9, 35]}),
}
#: its attention is swapped below, for good
_SWAPPED = "joy_image"
_PLAIN = ("flux_with_references", "qwen_image_edit", "z_image", "sd3", "cogvideox", "cosmos_predict2", "mochi", "wan_animate2", "seedvr2")


@pytest.fixture(scope="module", params=on_devices())
def devices(request: pytest.FixtureRequest) -> str:
    return request.param


def sampled(name: str, patched: Callable[[Branch, Link], Link] = lambda branch, model: model, **arguments: Any) -> Case:
    """``arguments``: of the model, where it is another one than its family's."""
    model = replace(MODELS[name], arguments={**MODELS[name].arguments, **arguments})

    def case(branch: Branch) -> Link:
        wire = branch.patch(patched(branch, model.load(branch)))
        return sample(branch, wire, model.conditioning(branch), latent(branch, model.latent), **model.settings)

    case.__name__ = name
    return case


@pytest.mark.parametrize("name", campaign.parameters(plain=_PLAIN, campaign=[name for name in MODELS if name not in (*_PLAIN, _SWAPPED)]))
def test_same_as_stock(server: ComfyServer, devices: str, name: str) -> None:
    found = compare(server, sampled(name), devices, cfg_split=1)
    assert "no sequence plan" not in found.sp.report and "not split" not in found.decision, found.sp.report


def patched_by(node: str, **inputs: Any) -> Callable[[Branch, Link], Link]:
    return lambda branch, model: branch.add(node, model=model, **inputs)[0]


UNSPLIT = {
    "a patch between the blocks": (
        sampled("z_image", patched_by("SPTestBetweenBlocks")),
        {},
        "NextDiT's tokens are not split with a patch between the blocks (a ControlNet), so only whole batch rows can be shared out",
    ),
    "a ring": (sampled("flux"), {"ring": 2}, "batch rows 2 + 2, "),
    "tiles": (sampled("flux"), {"layout": "tiles"}, "Flux's tokens are not split in tiles, which SP Model Patch was asked for, so"),
    "a patch that is told places": (
        sampled("krea2", patched_by("NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5)),
        {},
        "SingleStreamDiT's tokens are not split with a patch on the attention's output",
    ),
    "a replaced method": (
        sampled("flux", patched_by("SPTestObjectPatch", name="diffusion_model.forward_orig")),
        {},
        "Flux's tokens are not split here (the model's own forward_orig is replaced",
    ),
    "fewer heads than devices": (
        sampled("seedvr2", heads=1),
        {"cfg_split": 1},
        "not split, as attn of block 0 has 1 head for 2 devices, and one would get none",
    ),
    "another attention": (
        sampled(_SWAPPED, patched_by("SPTestOwnAttention")),
        {"cfg_split": 1},
        "not split, as attn of block 0 attended to its own part",
    ),
    "another attention behind code that is probed": (
        sampled(_SWAPPED, patched_by("SPTestNormBeforeAttention", counts=False)),
        {"cfg_split": 1},
        "not split, as attn of block 0 attended to its own part",
    ),
    "another attention with shared weights": (
        sampled(_SWAPPED, patched_by("SPTestOwnAttention")),
        {"cfg_split": 1, "weights": "shared"},
        "not split, as attn of block 0 attended to its own part",
    ),
}
REFUSED = {
    "code that counts its calls": (
        patched_by("SPTestNormBeforeAttention", counts=True),
        {"cfg_split": 1},
        "cannot be computed again as a whole, as other nodes' code in it keeps state",
    ),
    "halves that gather weights": (
        patched_by("SPTestOwnAttention"),
        {"cfg_split": 2, "weights": "shared"},
        "attn of block 0",
    ),
}


@pytest.mark.parametrize("what", campaign.parameters(plain=list(UNSPLIT)[:2], campaign=list(UNSPLIT)[2:]))
def test_what_cannot_be_split_is_no_error(server: ComfyServer, what: str) -> None:
    case, requested, told = UNSPLIT[what]
    assert told in compare(server, case, "cpu:2", **requested).sp.report


@pytest.mark.campaign
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_computed_again_is_refused(server: ComfyServer, what: str) -> None:
    patched, requested, told = REFUSED[what]
    case = sampled(_SWAPPED, patched)
    devices = "cpu:2" if requested["cfg_split"] == 1 else "cpu:4"
    with pytest.raises(PromptFailed, match=re.escape(told)):
        run_sp(server, case, devices, **requested)
    compare(server, sampled("flux"), devices)


def test_a_patch_between_blocks_gets_the_whole_picture(server: ComfyServer) -> None:
    found = compare(server, sampled("qwen_image_edit", patched_by("SPTestBetweenBlocks")), "cpu:2", cfg_split=1)
    assert "not split" not in found.decision
