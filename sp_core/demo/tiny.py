"""Shrinks a shipped API workflow to something that runs anywhere in seconds, and says what it changed.

The shape of the graph stays, and so do its loaders, samplers, guiders, schedulers and SP nodes.
The sizes, the files, the text encoder and everything behind the latent are replaced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows" / "api"

Prompt = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Tiny:
    """One shipped workflow, and what its parts are replaced by."""

    workflow: str
    title: str
    #: model file of the release -> tiny checkpoint
    files: dict[str, str]
    #: text embeddings: tokens and channels
    text: tuple[int, int]
    #: input name -> value, for every node that has it
    inputs: dict[str, Any]
    steps: int
    #: video tokens of a forward, for the table
    tokens: int

    def load(self) -> Prompt:
        return json.loads((WORKFLOWS / f"{self.workflow}.json").read_text())  # type: ignore[no-any-return]


#: 9 x 7 x 13 tokens: an odd number, which no even device count divides
TINY_WORKFLOWS = (
    Tiny(
        workflow="wan2.2_14B_t2v",
        title="Wan 2.2 14B (high and low noise)",
        files={
            "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors": "tiny_wan_t2v.safetensors",
            "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors": "tiny_wan_t2v_low.safetensors",
        },
        text=(12, 4096),
        inputs={"width": 208, "height": 112, "length": 33, "steps": 6, "end_at_step": 3, "start_at_step": 3},
        steps=6,
        tokens=819,
    ),
    Tiny(
        workflow="ltx2_av_t2v",
        title="LTX-2 (video and audio)",
        files={"ltx-2-19b-dev-fp8.safetensors": "tiny_ltxav.safetensors"},
        text=(16, 48),
        inputs={"width": 416, "height": 224, "length": 65, "frames_number": 65, "steps": 4},
        steps=4,
        tokens=819,
    ),
)


@dataclass
class Shrunk:
    """A shrunk prompt, the nodes that save its latents, and what was changed, in words."""

    prompt: Prompt
    saves: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


def shrink(prompt: Prompt, tiny: Tiny, devices: str | None, seed: int, prefix: str) -> Shrunk:
    """A copy of ``prompt`` with tiny parts.

    Args:
        devices: for the SP nodes; None takes them out, which leaves the stock graph.
        prefix: of the saved latents' names.
    """
    out = Shrunk({})
    said: dict[str, None] = {}
    patched: dict[str, list[Any]] = {}
    for name, node in prompt.items():
        class_type, inputs = node["class_type"], dict(node["inputs"])
        if class_type == "SPModelPatch" and devices is None:
            patched[name] = inputs["model"]
            continue
        before = {key: value for key, value in inputs.items() if key in tiny.inputs and not _keeps(inputs, key)}
        inputs |= {key: tiny.inputs[key] for key in before}
        for key, value in before.items():
            said[f"{key} {value} -> {tiny.inputs[key]}"] = None
        inputs |= {key: seed for key in ("seed", "noise_seed") if key in inputs}
        if class_type in ("UNETLoader", "CheckpointLoaderSimple"):
            file = inputs.get("unet_name") or inputs["ckpt_name"]
            said[f"{file} -> {tiny.files[file]}, random weights"] = None
            class_type, inputs = "UNETLoader", {"unet_name": tiny.files[file], "weight_dtype": "default"}
        elif class_type == "CLIPTextEncode":
            said["text encoder -> random embeddings seeded by the prompt"] = None
            class_type, inputs = "SPDemoText", {"text": inputs["text"], "tokens": tiny.text[0], "dim": tiny.text[1]}
        elif class_type == "LTXVEmptyLatentAudio":
            class_type = "SPDemoAudioLatent"
            inputs.pop("audio_vae")
        elif class_type in ("VAEDecode", "VAEDecodeTiled", "LTXVAudioVAEDecode"):
            said["VAE and video file -> the latent is saved as it is"] = None
            out.saves.append(name)
            class_type, inputs = "SaveLatent", {"samples": inputs["samples"], "filename_prefix": f"{prefix}-{name}"}
        elif class_type == "SPSampler" and devices is None:
            class_type = "KSampler"
            inputs.pop("devices")
        elif class_type in ("SPModelPatch", "SPSampler"):
            said[f"devices {inputs['devices']} -> {devices}"] = None
            inputs["devices"] = devices
        out.prompt[name] = {"class_type": class_type, "inputs": inputs}
    for node in out.prompt.values():
        for key, value in node["inputs"].items():
            while isinstance(value, list) and value[0] in patched:
                value = node["inputs"][key] = patched[value[0]]
    out.prompt = _needed(out.prompt, out.saves)
    out.changes = list(said)
    return out


def _keeps(inputs: dict[str, Any], key: str) -> bool:
    """The first of two samplers starts at 0, the second goes on to the end."""
    return (key == "start_at_step" and inputs[key] == 0) or (key == "end_at_step" and inputs[key] == 10000)


def _needed(prompt: Prompt, outputs: list[str]) -> Prompt:
    """The nodes that ``outputs`` depend on."""
    found: set[str] = set()
    waiting = list(outputs)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [value[0] for value in prompt[name]["inputs"].values() if isinstance(value, list)]
    return {name: node for name, node in prompt.items() if name in found}
