"""Inputs of the families' forwards, made anew at each call: small, and with sizes that do not divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sp_core.plans.kept_cache import KeptCache

#: of a forward's inputs: the method that takes them, where it is not the plan's
METHOD = "sp_method"


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def video(channels: int, *sizes: int, batch: int = 1) -> Tensor:
    return random(batch, channels, *sizes, seed=1)


def plain(x: Tensor, text_dim: int = 24, **more: Any) -> dict[str, Any]:
    timestep = torch.linspace(700.0, 300.0, x.shape[0])
    return {"x": x, "timestep": timestep, "context": random(x.shape[0], 7, text_dim, seed=2), **more}


def wan(channels: int = 16, **more: Any) -> dict[str, Any]:
    """5 x 5 x 7 tokens; height and width are not whole patches."""
    return plain(video(channels, 5, 9, 13), **more)


def causal(batch: int = 1) -> Iterator[dict[str, Any]]:
    """As ComfyUI's sampler calls CausalWan: a first frame, then two frames at a time, each computed again in the place of the last."""
    rooms = {name: torch.empty(batch, 5 * 35, 4, 24, device="meta") for name in ("k", "v")}
    caches = [KeptCache(i, {**rooms, "end": 0}, torch.device("cpu")) for i in range(3)]
    texts: list[dict[str, Any]] = [{"is_init": False} for _ in range(3)]
    for number, (start, frames, again) in enumerate(((0, 1, 0), (1, 2, 0), (1, 2, 70), (3, 2, 0))):
        for cache in caches:
            cache["end"] -= again
        x = random(batch, 16, frames, 9, 13, seed=number + 1)
        timestep = torch.linspace(700.0, 300.0, batch)[:, None].expand(batch, frames)
        made = {"x": x, "timestep": timestep, "context": random(batch, 7, 24, seed=9), "start_frame": start}
        yield {METHOD: "forward_block", **made, "kv_caches": caches, "crossattn_caches": texts}


def hunyuan(x: Tensor | None = None, *, mask: bool = True, **more: Any) -> dict[str, Any]:
    x = video(16, 3, 10, 14) if x is None else x
    base = plain(x, y=random(x.shape[0], 768, seed=3), guidance=torch.tensor([6.0]), **more)
    if mask:
        # a float mask, as the host makes it of the text encoder's
        base["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1, 0, 0]]).repeat(x.shape[0], 1)
    return base


def hunyuan_15(**more: Any) -> dict[str, Any]:
    sigmas = torch.tensor([1.0, 0.7, 0.3, 0.0])
    options = {"sigmas": sigmas[1:2], "sample_sigmas": sigmas}
    return {**plain(video(33, 3, 5, 7)), "transformer_options": options, **more}


def minimax(payload: dict[str, Any] | None = None, text: int = 9) -> dict[str, Any]:
    return {
        "x": [random(1, 24, 3, 9, 14, seed=1), random(1, 32, 2, 11, seed=2)],
        "timestep": torch.tensor([600.0]),
        "context": random(1, text, 40, seed=3),
        "minimax_payload": payload,
    }


def keyframes() -> dict[str, Any]:
    frames = [
        {"resolved_frame_index": 0, "latent": random(1, 24, 1, 10, 14, seed=4)},
        {"resolved_frame_index": 8, "latent": random(1, 24, 1, 10, 14, seed=5), "audio_latent": random(1, 32, 2, 3, seed=6)},
    ]
    return {
        "keyframes": frames,
        "cond_video_latents": [frame["latent"] for frame in frames],
        "cond_audio_latents": [frames[1]["audio_latent"]],
        "visual_cond_noise_aug": 0.9,
        "seed": 3,
    }


def references() -> dict[str, Any]:
    refs = [
        {"kind": "image", "latent_h": 6, "latent_w": 8, "latent": random(1, 24, 1, 6, 8, seed=4)},
        {"kind": "audio", "ref_audio_t": 4, "audio_latent": random(1, 32, 2, 4, seed=5)},
        {
            "kind": "video_audio",
            "latent_t": 2,
            "latent_h": 4,
            "latent_w": 6,
            "ref_audio_t": 3,
            "latent": random(1, 24, 2, 4, 6, seed=6),
            "audio_latent": random(1, 32, 2, 3, seed=7),
        },
    ]
    tags = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0, 1])
    return {
        "refs": refs,
        "cond_video_latents": [ref["latent"] for ref in refs if "latent" in ref],
        "cond_audio_latents": [ref["audio_latent"] for ref in refs if "audio_latent" in ref],
        "text_token_tags": tags,
    }
