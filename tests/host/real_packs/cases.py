"""What a case with a real pack is: a node, a tiny model that it fits, and what is expected in front of SP Model Patch and behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from host.graphs import Branch, Link, latent, load, sample, text

SAME, REFUSED, FAILS = "same", "refused", "fails without SP Model Patch"
BEFORE, BEHIND = "before", "behind"


@dataclass(frozen=True)
class Pack:
    """A pack as it was tried: folder name, commit, and the commit's date."""

    folder: str
    commit: str
    date: str


PACKS = (
    Pack("ComfyUI-KJNodes", "3f20054", "2026-08-14"),
    Pack("ComfyUI-LTXVideo", "aceeae9", "2026-06-30"),
    Pack("ComfyUI-GGUF", "795e451", "2025-12-18"),
    Pack("RES4LYF", "022c873", "2026-07-17"),
    Pack("rgthree-comfy", "13b4399", "2026-08-21"),
    Pack("ComfyUI-MultiGPU", "a38cbda", "2026-03-21"),
    Pack("ComfyUI-TeaCache", "91dff8e", "2025-07-12"),
    Pack("ComfyUI-MagCache", "47bdd2a", "2025-11-27"),
    Pack("ComfyUI-RadialAttn", "effd401", "2025-12-19"),
    Pack("Comfy-WaveSpeed", "8253745", "2025-08-02"),
)


# -- models -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A tiny checkpoint, with the text and the latent that it takes."""

    checkpoint: str
    words: Callable[[Branch], tuple[Link, Link]]
    start: str


def ltx_words(branch: Branch, dim: int = 48, masked: bool = False) -> tuple[Link, Link]:
    made = text(branch, dim, tokens=16, frame_rate=25.0)
    if masked:
        made = tuple(branch.add("SPTestTextMask", conditioning=c, hidden=5)[0] for c in made)  # type: ignore[assignment]
    return made


def hunyuan_words(branch: Branch) -> tuple[Link, Link]:
    spec = json.dumps({"pooled_output": [1, 768]})
    made = [branch.add("SPTestConditioningTensors", conditioning=c, tensors=spec, seed=i)[0] for i, c in enumerate(text(branch, 64))]
    return made[0], made[1]


def heard_words(branch: Branch) -> tuple[Link, Link]:
    """A person who speaks for 9 frames of 112 x 80 pixels."""
    positive, negative = text(branch, 20)
    vae = branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0]
    voice = branch.add("SPTestLongCatVoice", moments=40, seed=11)[0]
    size = {"width": 112, "height": 80, "length": 9}
    made = branch.add("SPLongCatAvatar", positive=positive, negative=negative, vae=vae, audio_1=voice, **size)
    return made[0], made[1]


MODELS: Mapping[str, Model] = {
    # 3 x 5 x 7 = 105 tokens, which neither 2 nor 4 divides
    "wan": Model("tiny_wan_t2v", lambda branch: text(branch, 4096), "1,16,3,10,14"),
    "ltxv": Model("tiny_ltxv", lambda branch: ltx_words(branch, masked=True), "1,128,3,5,7"),
    "ltxav": Model("tiny_ltxav", ltx_words, "1,128,3,5,7;1,8,13,16"),
    "ltx23": Model("tiny_ltx23", lambda branch: ltx_words(branch, 192), "1,128,3,5,7;1,8,13,16"),
    "hunyuan": Model("tiny_hunyuan", hunyuan_words, "1,16,3,10,14"),
    "hunyuan_i2v": Model("tiny_hunyuan_i2v", hunyuan_words, "1,16,3,10,14"),
    "hunyuan15": Model("tiny_hunyuan15", hunyuan_words, "1,32,3,5,7"),
    "minimax": Model("tiny_minimax", lambda branch: text(branch, 40), "1,24,3,9,14;1,32,2,11"),
    "avatar": Model("tiny_avatar", heard_words, "1,16,3,10,14"),
}


# -- cases ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Where and with what guidance a case is sampled."""

    devices: str = "cpu:2"
    cfg: float = 4.0
    requested: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return "-".join([self.devices, f"cfg{self.cfg:g}", *(f"{key}{value}" for key, value in self.requested)])


#: the positive and the negative prompt on a device each; then all tokens shared out
GUIDED = Setting()
SHARED = Setting(requested=(("cfg_split", 1),))
UNGUIDED = Setting(cfg=1.0)
THREE = Setting("cpu:3", 1.0)


@dataclass(frozen=True)
class Case:
    """One row of the table in docs/patches.md."""

    pack: str
    node: str
    model: str = "wan"
    #: of the node; a function of the branch makes a wire. What is left out has the node's default
    inputs: Mapping[str, Any] = field(default_factory=dict)
    before: str | None = SAME
    behind: str | None = SAME
    #: whether the picture is another one than without the node; None where it is by rounding only
    changes: bool | None = True
    settings: tuple[Setting, ...] = (GUIDED, SHARED)
    #: what tells this row from others of the same node
    label: str = ""
    #: for the table
    note: str = ""
    #: a pattern that a refusal has besides the node's name and a way out
    sentence: str = ""
    #: a class or function of the node, which a refusal may name in its stead
    code: str = ""
    tolerance: float = 2e-5
    #: the loader in front; the host's where a case says nothing
    loaded: Callable[[Branch, Case], Link] | None = None
    #: the node itself, where it is not simply one that takes ``model`` and gives a MODEL
    applied: Callable[[Branch, Case, Link], Link] | None = None
    #: gives the latent; the host's KSampler where a case says nothing
    sampled: Callable[[Branch, Case, Link, float], Link] | None = None
    steps: int = 2
    #: a checkpoint file of its own: the node changes the model that all who load the file share
    own: bool = False
    #: compared with the graph without the node: it is to do nothing
    plain_stock: bool = False
    #: of the latent's mask
    mask: str = ""
    #: what the report begins with where the last of several sampling runs computes nothing
    report: str = ""

    @property
    def checkpoint(self) -> str:
        name = MODELS[self.model].checkpoint
        return f"{name}_{re.sub(r'[^a-z0-9]+', '_', self.id.lower())}" if self.own else name

    @property
    def latent(self) -> str:
        return MODELS[self.model].start

    @property
    def id(self) -> str:
        return "-".join(part for part in (self.pack, self.node, self.model, self.label) if part).replace(" ", "_")

    def wires(self, branch: Branch, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        chosen = self.inputs if inputs is None else inputs
        return {name: value(branch) if callable(value) else value for name, value in chosen.items()}

    def words(self, branch: Branch) -> tuple[Link, Link]:
        return MODELS[self.model].words(branch)

    def start(self, branch: Branch, **changes: Any) -> Link:
        return latent(branch, self.latent, **{**({"scale": 1.0, "mask": self.mask} if self.mask else {}), **changes})

    def build(self, branch: Branch, side: str | None, cfg: float) -> Link:
        """The wire of the latent; with ``side`` None the node is left out."""
        model = self.loaded(branch, self) if self.loaded and side else load(branch, self.checkpoint)
        if side == BEFORE:
            model = self.apply(branch, model)
        model = branch.patch(model)
        if side == BEHIND:
            model = self.apply(branch, model)
        if self.sampled and side:
            return self.sampled(branch, self, model, cfg)
        return sample(branch, model, self.words(branch), self.start(branch), cfg=cfg, steps=self.steps)

    def apply(self, branch: Branch, model: Link) -> Link:
        if self.applied:
            return self.applied(branch, self, model)
        if self.loaded or self.sampled:
            return model
        return branch.add(self.node, model=model, **self.wires(branch))[0]


def loader(pack: str, node: str, model: str = "wan", *, slot: int = 0, **more: Any) -> Case:
    """A node that loads a MODEL: it can stand in front only."""
    inputs = more.pop("inputs", {})

    def loaded(branch: Branch, case: Case) -> Link:
        return branch.add(node, **case.wires(branch))[slot]

    return Case(pack, node, model, inputs, behind=None, loaded=loaded, **{"changes": False, **more})


def sampler(pack: str, node: str, model: str, sampled: Callable[[Branch, Case, Link, float], Link], **more: Any) -> Case:
    """A node that takes the patched MODEL and samples, or gives what sampling needs: it can stand behind only."""
    return Case(pack, node, model, more.pop("inputs", {}), before=None, **{"behind": SAME, **more}, sampled=sampled)


def complete(prompt: dict[str, Any], info: Callable[[str], Any]) -> None:
    """Fill in the defaults of inputs that a prompt leaves out, as the frontend does.

    Args:
        info: what the server says of a node (``/object_info``).
    """
    for node in prompt.values():
        asked = info(node["class_type"])["input"]
        for name, (kind, *details) in {**asked.get("required", {}), **asked.get("optional", {})}.items():
            options = details[0] if details else {}
            if name in node["inputs"] or options.get("forceInput"):
                continue
            if "default" in options:
                node["inputs"][name] = options["default"]
            elif isinstance(kind, list) or kind == "COMBO":
                choices = kind if isinstance(kind, list) else options["options"]
                node["inputs"][name] = choices[0]
            elif kind in _EMPTY:
                node["inputs"][name] = _EMPTY[kind]


_EMPTY = {"INT": 0, "FLOAT": 0.0, "STRING": "", "BOOLEAN": False}
