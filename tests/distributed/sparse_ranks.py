"""The tiny LongCat-Video with block-sparse attention and its reference outputs, on one process or on spawned ranks."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from distributed.longcat_ranks import load
from torch import Tensor

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "longcat_bsa.safetensors"
OPTIONS = {"longcat_block_sparse": {"sparsity": 0.75}}
CASES = ("t2v", "cond4", "cond4_cached")
#: (frames, height and width of the latent, conditioning frames): nothing of it divides by the tiles
ODD = {"frames": (7, 16, 16, 0), "all": (6, 14, 22, 0), "one clean": (5, 14, 18, 1), "five clean": (9, 12, 18, 5)}


@functools.lru_cache(maxsize=1)
def reference() -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {key[len("dit.") :]: value for key, value in load_file(FIXTURE).items() if key.startswith("dit.")}


def load_sparse(comfyui: str) -> Any:
    """A ModelPatcher, as UNETLoader makes it of a checkpoint with these weights."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({key[len("model.") :]: value for key, value in reference().items() if key.startswith("model.")}, path)
        return load(comfyui, path)


def inputs(case: str) -> dict[str, Any]:
    data = reference()
    clean = 4 if case.startswith("cond4") else 0
    return {
        "x": data["in.latent"].clone(),
        "timestep": torch.full((1,), 500.0),
        "context": data["in.text"] * data["in.text_mask"][..., None],
        "num_cond_latents": clean,
    }


def odd_inputs(case: str) -> dict[str, Any]:
    frames, height, width, clean = ODD[case]
    x = torch.randn(1, 16, frames, height, width, generator=torch.Generator().manual_seed(8))
    return {**inputs("t2v"), "x": x, "num_cond_latents": clean}


def options(case: str) -> dict[str, Any]:
    return {**OPTIONS, "longcat_kv_cache": "gpu"} if case.endswith("cached") else dict(OPTIONS)


def forward(model: Any, case: str) -> Tensor:
    """Data minus noise; of a cached pass the frames behind the conditioning."""
    given = odd_inputs(case) if case in ODD else inputs(case)
    if not case.endswith("cached"):
        return -model(**given, transformer_options=options(case))
    model(**given, transformer_options=options(case))
    out = -model(**given, transformer_options=options(case))[:, :, 4:]
    model.clear_cache()
    return out


def every_case(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """Output of each case on this rank."""
    from sp_core.comm import CollectiveTransport
    from sp_core.host.worker.comfy_attention import host_functions
    from sp_core.plans import Engine, plan_named

    model = load_sparse(comfyui).model.diffusion_model
    engine = Engine(plan_named(type(model).__name__), CollectiveTransport(), host=host_functions())
    seen: dict[str, Any] = {}
    with torch.inference_mode():
        for case in (*CASES, *ODD):
            given = odd_inputs(case) if case in ODD else inputs(case)
            for _ in range(2 if case.endswith("cached") else 1):
                with engine.installed(model) as state:
                    out = -model(**given, transformer_options=options(case))
                    state.check()
            model.clear_cache()
            seen[case] = ((out[:, :, 4:] if case.endswith("cached") else out).numpy().copy(), state.describe())
    return seen
