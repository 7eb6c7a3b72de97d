"""Models without a plan, and forwards that a plan does not split, through a real server: batch rows are shared out, or all is on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from host.family_checkpoints import write_families
from host.graphs import Branch, Case, Link, compare, latent, load, sample, text

from sp_core.demo.comfy_server import ComfyServer

pytestmark = pytest.mark.usefixtures("checkpoints")
WITHOUT_PLAN = "has no sequence plan, so only whole batch rows can be shared out"
IN_TILES = "'s tokens are not split in tiles, which SP Model Patch was asked for, so only whole batch rows can be shared out"


@pytest.fixture(scope="module")
def checkpoints(comfyui: Path, base: Path) -> None:
    write_families(comfyui, base, ["tiny_unet"])


#: an image transformer without wrappers around its forward. It has a plan, and its tokens are not split in tiles
ERNIE = {"hidden_size": 96, "num_attention_heads": 6, "num_layers": 2, "ffn_hidden_size": 64, "text_in_dim": 24, "rope_axes_dim": [4, 6, 6]}


def conditioning(branch: Branch, dim: int, second: int = 7) -> tuple[Link, Link]:
    positive, negative = text(branch, dim)
    if second != 7:
        negative = branch.add("SPTestConditioning", seed=2, tokens=second, dim=dim)[0]
    return positive, negative


def case(model: str, batch: int, cfg: float, add: str = "", key: str = "", name: str = "", seed: int = 5) -> Case:
    channels, dim = {"tiny_unet": (4, 768), "ernie": (128, 24)}[model]

    def build(branch: Branch) -> Link:
        if model == "ernie":
            wire = branch.add("SPTestTinyModel", kind="ErnieImage", arguments=json.dumps(ERNIE), seed=3)[0]
        else:
            wire = load(branch, model)
        if key:
            wire = branch.add("SPTestWeightPatch", model=wire, key=key)[0]
        if add == "FreeU":
            wire = branch.add("FreeU_V2", model=wire, b1=1.3, b2=1.4, s1=0.9, s2=0.2)[0]
        positive, negative = conditioning(branch, dim, second=5 if add == "unequal texts" else 7)
        if add == "control":
            control = branch.add("SPTestControl", positive=positive, negative=negative, channels=320)
            positive, negative = control[0], control[1]
        patched = branch.patch(wire)
        return sample(branch, patched, (positive, negative), latent(branch, f"{batch},{channels},8,8"), cfg=cfg, steps=3, seed=seed)

    build.__name__ = name or f"{model}_{batch}_{cfg}_{add}".rstrip("_")
    return build


_ATTENTION = {
    "tiny_unet": "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_v.weight",
    "ernie": "diffusion_model.layers.0.self_attention.to_q.weight",
}
SHARED = [
    ("cpu:2", case("tiny_unet", 1, 4.0), "batch rows 1 + 1, "),
    ("cpu:2", case("tiny_unet", 3, 4.0, key=_ATTENTION["tiny_unet"], name="a_patched_unet"), "batch rows 3 + 3, "),
    ("cpu:2", case("tiny_unet", 3, 4.0, "control"), "batch rows 3 + 3, "),
    ("cpu:2", case("tiny_unet", 3, 1.0), "batch rows 2 + 1, "),
    ("cpu:2", case("ernie", 1, 4.0, key=_ATTENTION["ernie"], name="a_patched_ernie"), "batch rows 1 + 1, "),
    ("cpu:2", case("ernie", 3, 4.0), "batch rows 3 + 3, "),
    ("cpu:3", case("tiny_unet", 3, 4.0), "batch rows 2 + 2 + 2, "),
    ("cpu:3", case("ernie", 1, 4.0), "batch rows 1 + 1, 1 idle, "),
    ("cpu:3", case("ernie", 3, 4.0), "batch rows 2 + 2 + 2, "),
]
ALONE = [
    ("cpu:2", case("tiny_unet", 1, 1.0), "and this forward has one"),
    ("cpu:2", case("ernie", 1, 1.0), "and this forward has one"),
    # ComfyUI computes texts of unequal length one after another
    ("cpu:2", case("ernie", 1, 4.0, "unequal texts"), "and this forward has one"),
    ("cpu:2", case("tiny_unet", 1, 4.0, "FreeU"), "runs inside the model and may compare them"),
    ("cpu:3", case("ernie", 1, 1.0), "and this forward has one"),
]


def _name(value: object) -> str:
    return getattr(value, "__name__", str(value))


def requested(build: Case) -> dict[str, str]:
    return {"layout": "tiles"} if "ernie" in _name(build) else {}


def told(build: Case) -> str:
    return IN_TILES if "ernie" in _name(build) else WITHOUT_PLAN


@pytest.mark.parametrize(("devices", "build", "decision"), SHARED, ids=_name)
def test_rows_are_shared_out(server: ComfyServer, devices: str, build: Case, decision: str) -> None:
    found = compare(server, build, devices, **requested(build))
    assert decision in found.decision and found.decision.endswith(told(build)), found.sp.report


@pytest.mark.parametrize(("devices", "build", "why"), ALONE, ids=_name)
def test_one_device_computes_all(server: ComfyServer, devices: str, build: Case, why: str) -> None:
    found = compare(server, build, devices, **requested(build))
    count = int(devices[-1])
    assert found.decision.startswith(f"{count} devices: one computes all, {count - 1} idle; "), found.sp.report
    assert told(build) in found.decision and found.decision.endswith(why), found.sp.report
