"""The tiny LongCat-Video model with its reference inputs and outputs, on one process or on spawned ranks."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "longcat_tiny.safetensors"
CASES = ("t2v", "i2v", "continuation", "continuation_cached")


def enter_host(comfyui: str) -> None:
    """Make the host importable, on the CPU; argument parsing is off unless the host's own main starts it."""
    if comfyui not in sys.path:
        sys.path.insert(0, comfyui)
    from comfy.cli_args import args

    args.cpu = True


@functools.lru_cache(maxsize=1)
def reference() -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(FIXTURE)


def load(comfyui: str, path: Path = FIXTURE, **model_options: Any) -> Any:
    """A ModelPatcher, as UNETLoader makes it."""
    enter_host(comfyui)
    import comfy.sd

    from sp_core.models.registration import register_models

    assert register_models()
    return comfy.sd.load_diffusion_model(str(path), model_options)


def inputs(case: str) -> dict[str, Any]:
    """Arguments of one forward: x (2, 16, 4, 12, 16), timestep (2,) or (2, 4), context (2, 12, C)."""
    data = reference()
    clean = {"t2v": 0, "i2v": 1}.get(case, 2)
    timestep = torch.full((2, 4), 700.0)
    timestep[:, :clean] = 0
    return {
        "x": data["in.latent_continuation" if case.startswith("continuation") else "in.latent"].clone(),
        "timestep": timestep if clean else timestep[:, 0],
        # the host zeroes padding rows of the text encoder's output
        "context": data["in.text"] * data["in.text_mask"][..., None],
        "num_cond_latents": clean,
    }


def forward(model: Any, case: str) -> Tensor:
    """What the reference gives: data minus noise; of a cached pass the frames behind the conditioning."""
    if case != "continuation_cached":
        return -model(**inputs(case))
    options = {"longcat_kv_cache": "gpu"}
    model(**inputs(case), transformer_options=options)
    return forward_cached(model, options)


def forward_cached(model: Any, options: dict[str, Any]) -> Tensor:
    return -model(**inputs("continuation_cached"), transformer_options=options)[:, :, 2:]


def every_case(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """Output, exchanges, bytes sent and layout of each case on this rank; what its cache holds."""
    from sp_core.comm import CollectiveTransport
    from sp_core.host.worker.comfy_attention import host_functions
    from sp_core.plans import Engine, plan_named, validate

    model = load(comfyui).model.diffusion_model
    plan = plan_named(type(model).__name__)
    validate(plan, model, "this ComfyUI")
    transport = CollectiveTransport()
    engine = Engine(plan, transport, host=host_functions())
    seen: dict[str, Any] = {}

    def run(name: str, call: Any) -> None:
        transport.stats.reset()
        with engine.installed(model) as state:
            out = call()
            state.check()
        seen[name] = (out.numpy().copy(), transport.stats.exchanges, transport.stats.bytes_sent, state.describe())

    with torch.inference_mode():
        for case in CASES[:3]:
            run(case, lambda case=case: forward(model, case))
        options = {"longcat_kv_cache": "gpu"}
        run("filling", lambda: model(**inputs("continuation_cached"), transformer_options=options))
        run("continuation_cached", lambda: forward_cached(model, options))
        k, _ = next(iter(model.kv_cache.entries[0].blocks.values()), (torch.empty(1, 0, 0), None))
        seen["cache"] = (len(model.kv_cache.entries), tuple(k.shape))
        model.clear_cache()
        odd = {**inputs("i2v"), "x": inputs("i2v")["x"][..., :11, :13]}
        run("odd size", lambda: model(**odd))
        small = {**inputs("continuation_cached"), "x": inputs("i2v")["x"][..., :2, :6]}
        run("three tokens a frame", lambda: model(**small))
    return seen
