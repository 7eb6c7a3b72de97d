"""The shipped workflows with SP VAE Patch, through a real server with tiny models: the pixels are those without SP's nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host.graphs import TOLERANCE, read, relative
from host.test_vae import write_vaes

from sp_core.demo.comfy_server import EXTENSION, ComfyServer

Prompt = dict[str, dict[str, Any]]
SIZES = {
    "wan2.2_14B_i2v": {"width": 48, "height": 56, "length": 9, "steps": 2, "start_at_step": 1, "end_at_step": 1},
    "ltx2_av_i2v": {"width": 96, "height": 160, "length": 17, "steps": 2},
}
#: workflow -> (model, VAE, what a text encoder makes)
TINY = {
    "wan2.2_14B_i2v": ("tiny_wan_i2v", "tiny_wan21_vae", {"tokens": 7, "dim": 4096}),
    "ltx2_av_i2v": ("tiny_ltxav", "tiny_ltx_vae", {"tokens": 16, "dim": 48}),
}
#: loaders of what is replaced, and what comes behind the pixels
LEFT_OUT = {"CLIPLoader", "LTXAVTextEncoderLoader", "LTXVAudioVAELoader", "LTXVAudioVAEDecode", "CreateVideo", "SaveVideo"}


@pytest.fixture(scope="module")
def own(comfyui: Path, base: Path) -> Iterator[ComfyServer]:
    write_vaes(comfyui, base)
    with ComfyServer(comfyui, base, "--cpu") as server:
        yield server


def shrunk(workflow: str, devices: str | None) -> tuple[Prompt, str]:
    """The workflow with tiny models and sizes, and the node that saves its pixels; without ``devices`` it lacks SP's nodes."""
    model, vae, words = TINY[workflow]
    prompt: Prompt = json.loads((EXTENSION / "workflows" / "api" / f"{workflow}.json").read_text())
    texts = [key for key, node in prompt.items() if node["class_type"] == "CLIPTextEncode"]
    replaced = {
        "UNETLoader": lambda key: ("UNETLoader", {"unet_name": f"{model}.safetensors", "weight_dtype": "default"}),
        "CheckpointLoaderSimple": lambda key: ("UNETLoader", {"unet_name": f"{model}.safetensors", "weight_dtype": "default"}),
        "VAELoader": lambda key: ("VAELoader", {"vae_name": f"{vae}.safetensors"}),
        "CLIPTextEncode": lambda key: ("SPTestConditioning", {"seed": texts.index(key), **words}),
        "LoadImage": lambda key: ("SPTestImage", {"frames": 1, "height": 64, "width": 64, "seed": 3}),
        "LTXVEmptyLatentAudio": lambda key: ("SPTestLatent", {"shapes": "1,8,13,16", "seed": 0, "scale": 0.0, "mask": ""}),
    }
    prompt = {key: node for key, node in prompt.items() if node["class_type"] not in LEFT_OUT}
    moved: dict[tuple[str, int], list[Any]] = {}
    for key, node in prompt.items():
        if node["class_type"] == "CheckpointLoaderSimple":
            moved[key, 2] = ["vae", 0]
        if node["class_type"] in ("SPModelPatch", "SPVAEPatch"):
            given = node["inputs"]["vae" if node["class_type"] == "SPVAEPatch" else "model"]
            if devices is None:
                moved[key, 0] = moved.get(tuple(given), given)
            node["inputs"]["devices"] = devices
        if change := replaced.get(node["class_type"]):
            node["class_type"], node["inputs"] = change(key)
    if devices is None:
        prompt = {key: node for key, node in prompt.items() if node["class_type"] not in ("SPModelPatch", "SPVAEPatch")}
    if moved:
        prompt["vae"] = {"class_type": "VAELoader", "inputs": {"vae_name": f"{vae}.safetensors"}}
    for node in prompt.values():
        for name, value in node["inputs"].items():
            sized = SIZES[workflow].get(name, value)
            # of two stages the second one goes on to the end
            kept = name in ("start_at_step", "end_at_step") and value in (0, 10000)
            node["inputs"][name] = moved.get(tuple(value), value) if isinstance(value, list) else value if kept else sized
    (decode,) = (key for key, node in prompt.items() if node["class_type"] == "VAEDecode")
    prompt["pixels"] = {"class_type": "SPTestPixels", "inputs": {"image": [decode, 0]}}
    prompt["save"] = {"class_type": "SPTestSaveLatent", "inputs": {"samples": ["pixels", 0], "name": f"{workflow}-{devices is None}"}}
    return prompt, "save"


@pytest.mark.campaign
@pytest.mark.parametrize("workflow", SIZES)
def test_a_shipped_workflow_gives_the_pixels_of_one_device(own: ComfyServer, workflow: str) -> None:
    results = []
    for devices in (None, "cpu:3"):
        prompt, saved = shrunk(workflow, devices)
        assert ("SPVAEPatch" in {node["class_type"] for node in prompt.values()}) == (devices is not None)
        results.append(read(own.run(prompt)[saved]).parts[0])
    stock, mine = results
    assert stock.std() > 1e-3, "the stock picture is empty: the case compares nothing"
    print(f"\n{workflow}: relative L2 {relative(mine, stock):.2g}")
    assert relative(mine, stock) <= TOLERANCE
    computed = [state for state in own.get("/sp/status")["models"] if state["forwards"] and "band" in state["decision"]]
    assert computed, "the VAE did not compute in the workers"
