"""Families of further models. Of their forwards a plain run tries a part."""

from __future__ import annotations

from typing import Any

import torch
from host.family import Family
from host.family_inputs import plain, random, video

_ERNIE = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_layers": 2,
    "ffn_hidden_size": 64,
    "in_channels": 16,
    "out_channels": 16,
    "text_in_dim": 24,
    "rope_axes_dim": [4, 6, 6],
}
_PIXART = {
    "in_channels": 4,
    "hidden_size": 96,
    "depth": 2,
    "num_heads": 6,
    "mlp_ratio": 2.0,
    "caption_channels": 24,
    "model_max_length": 7,
}
_HUNYUAN_DIT = {
    "hidden_size": 96,
    "depth": 4,
    "num_heads": 6,
    "mlp_ratio": 2.0,
    "text_states_dim": 24,
    "text_states_dim_t5": 32,
    "text_len": 7,
    "text_len_t5": 6,
}
_PIXEL_DIT = {
    "num_groups": 6,
    "hidden_size": 96,
    "pixel_hidden_size": 8,
    "pixel_attn_hidden_size": 48,
    "pixel_num_groups": 3,
    "patch_depth": 2,
    "pixel_depth": 1,
    "patch_size": 4,
    "txt_embed_dim": 24,
    "txt_max_length": 7,
}
_SEEDVR = {
    "norm_eps": 1e-5,
    "num_layers": 2,
    "mlp_type": "swiglu",
    "vid_dim": 96,
    "txt_in_dim": 24,
    "heads": 5,
    "head_dim": 24,
    "mm_layers": 1,
    "expand_ratio": 1,
    "rope_dim": 24,
    "vid_out_norm": "fusedrms",
}


def _seedvr(*sizes: int, batch: int = 1) -> dict[str, Any]:
    """With 80 x 88 latent places three by three windows. A batch holds both conditionings of a prompt, in the order of the host."""
    x = video(16, *(sizes or (1, 80, 88)), batch=batch)
    options = {"cond_or_uncond": [1, 0][-batch:]}
    return plain(x, condition=random(batch, 17, *x.shape[2:], seed=4), transformer_options=options)


def _with(inputs: dict[str, Any], timestep: str = "timesteps") -> dict[str, Any]:
    """The same inputs with the timestep by the name that the model has for it."""
    return {timestep if name == "timestep" else name: value for name, value in inputs.items()}


def _hunyuan_dit(batch: int = 1, **more: Any) -> dict[str, Any]:
    """5 x 7 tokens."""
    masks = {"text_embedding_mask": torch.ones(batch, 7), "text_embedding_mask_t5": torch.tensor([[1.0, 1, 1, 1, 0, 0]] * batch)}
    inputs = plain(video(4, 10, 14, batch=batch), **masks, encoder_hidden_states_t5=random(batch, 6, 32, seed=3), **more)
    return _with(inputs, "t")


FURTHER: dict[str, Family] = {
    "ErnieImage": Family(
        "comfy.ldm.ernie.model",
        "ErnieImageModel",
        _ERNIE,
        {"text": lambda: _with(plain(video(16, 5, 7))), "two pictures": lambda: _with(plain(video(16, 5, 7, batch=2)))},
        plain=(("text", 3),),
    ),
    "PixArt": Family(
        "comfy.ldm.pixart.pixartms",
        "PixArtMS",
        _PIXART,
        {"text": lambda: _with(plain(video(4, 34, 38))), "two pictures": lambda: _with(plain(video(4, 34, 38, batch=2)))},
        plain=(("text", 3),),
    ),
    "Hunyuan DiT": Family(
        "comfy.ldm.hydit.models",
        "HunYuanDiT",
        _HUNYUAN_DIT,
        {
            "text": _hunyuan_dit,
            "two pictures": lambda: _hunyuan_dit(2),
            "ControlNet": lambda: _hunyuan_dit(control={"output": [random(1, 35, 96, seed=5)]}),
        },
        plain=(("ControlNet", 3),),
    ),
    "SeedVR2": Family(
        "comfy.ldm.seedvr.model",
        "NaDiT",
        _SEEDVR,
        {"picture": _seedvr, "video": lambda: _seedvr(3, 10, 14), "both prompts": lambda: _seedvr(3, 10, 14, batch=2)},
        plain=(("picture", 3), ("both prompts", 2)),
    ),
    "PixelDiT": Family(
        "comfy.ldm.pixeldit.model",
        "PixDiT_T2I",
        _PIXEL_DIT,
        {"text": lambda: _with(plain(video(3, 19, 27))), "two pictures": lambda: _with(plain(video(3, 19, 27, batch=2)))},
        plain=(("text", 3),),
    ),
}
