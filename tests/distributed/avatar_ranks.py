"""The tiny LongCat-Video-Avatar with its reference inputs and outputs, on one process or on spawned ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from distributed.longcat_ranks import load
from torch import Tensor

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "longcat_avatar_tiny.safetensors"
#: guidance of the fixture
TEXT, AUDIO = 3.5, 2.5
BRANCHES = {"cond": (1, True), "uncond_text": (0, True), "uncond": (0, False)}
FORWARDS = (
    *(f"{kind}.{branch}" for kind in ("at2v", "ai2v", "ai2v_two", "avc", "avc_two") for branch in BRANCHES),
    *("at2v.batch", "ai2v.batch", "ai2v_three.cond", "avc.no_range", "avc.far", "avc.negative", "avc_three.cond"),
)
CACHED = ("avc_cached.cond", "avc_cached.uncond", "avc_cached.batch", "avc_two_cached.cond", "avc_three_cached.cond")


@functools.lru_cache(maxsize=1)
def reference() -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(FIXTURE)


def load_avatar(comfyui: str, path: Path = FIXTURE) -> Any:
    """A ModelPatcher, as UNETLoader makes it."""
    return load(comfyui, path)


def context(rows: list[int]) -> Tensor:
    """Text of these rows; the host zeroes padding rows of the text encoder's output."""
    data = reference()
    return (data["in.text"] * data["in.text_mask"][..., None])[rows]


def voices(kind: str) -> int:
    return 2 if "_two" in kind else 3 if "_three" in kind else 1


def inputs(case: str) -> dict[str, Any]:
    """Arguments of one forward, by the name of its output."""
    data = reference()
    kind, branch = case.split(".")
    batch = branch == "batch"
    row, heard = BRANCHES.get(branch, (1, True))
    continuation = kind.startswith("avc")
    x = data["in.latent_continuation"][:, :, 1:] if continuation else data["in.latent"][: 2 if batch else 1]
    if continuation and batch:
        x = x.repeat(2, 1, 1, 1, 1)
    count = voices(kind)
    audio = data["in.audio_next" if continuation else "in.audio"]
    audio = (
        audio[:1, None].repeat(x.size(0), 1, 1, 1, 1, 1) if continuation and batch else audio[:2, None] if batch else audio[None, :count]
    )
    given: dict[str, Any] = {
        "x": x.clone(),
        "timestep": torch.full((x.size(0),), 700.0),
        "context": context([0, 1] if batch else [row]),
        "num_cond_latents": 2 if continuation else int(kind.startswith("ai2v")),
        "audio_embed": audio if heard else torch.zeros_like(audio),
    }
    if kind == "at2v" and batch:
        given["timestep"] = torch.tensor([700.0, 300.0])
    if count > 1:
        given["people_masks"] = data["in.masks"][None, : 3 if count == 2 else 4]
    if continuation:
        place = {"far": 30, "negative": -10}.get(branch, 4)
        around = 0 if branch == "no_range" else 1
        given |= {"reference_latent": data["in.latent_continuation"][:1, :, :1], "reference_frame": place, "hidden_around": around}
    return given


def expected(case: str) -> Tensor:
    """The reference's output; of a continuation without its reference frame."""
    out = reference()[f"out.{case}"]
    return out[:, :, 1:] if case.startswith("avc") and "cached" not in case else out


def forward(model: Any, case: str) -> Tensor:
    """What the reference gives: data minus noise."""
    if "cached" not in case:
        return -model(**inputs(case))
    options = {"longcat_kv_cache": "gpu"}
    model(**inputs(case), transformer_options=options)
    out = -model(**inputs(case), transformer_options=options)[:, :, 2:]
    model.clear_cache()
    return out


def guided(outputs: dict[str, Tensor], kind: str) -> Tensor:
    cond, text, uncond = (outputs[f"{kind}.{branch}"].double() for branch in BRANCHES)
    return uncond + TEXT * (cond - text) + AUDIO * (text - uncond)


def every_case(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """Output, exchanges and layout of each case on this rank."""
    from sp_core.comm import CollectiveTransport
    from sp_core.host.worker.comfy_attention import host_functions
    from sp_core.plans import Engine, plan_named, validate

    model = load_avatar(comfyui).model.diffusion_model
    plan = plan_named(type(model).__name__)
    validate(plan, model, "this ComfyUI")
    transport = CollectiveTransport()
    engine = Engine(plan, transport, host=host_functions())
    seen: dict[str, Any] = {}
    with torch.inference_mode():
        for case in (*FORWARDS, *CACHED):
            options = {"longcat_kv_cache": "gpu"} if "cached" in case else {}
            for _ in range(2 if options else 1):
                transport.stats.reset()
                with engine.installed(model) as state:
                    out = -model(**inputs(case), transformer_options=dict(options))
                    state.check()
            model.clear_cache()
            out = out[:, :, 2:] if options else out
            seen[case] = (out.numpy().copy(), transport.stats.exchanges, state.describe())
    return seen
