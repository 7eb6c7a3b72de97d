"""Every family's real class, tiny, with random weights, and its forwards by name.

For what would be slow through a server: head counts that do not divide, five ranks, many variants.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from host.family import Family
from host.family_inputs import hunyuan, hunyuan_15, keyframes, minimax, plain, random, references, video, wan
from host.further_families import FURTHER
from host.picture_families import PICTURES
from host.video_families import VIDEOS
from torch import Tensor

_WAN = {"model_type": "t2v", "dim": 96, "ffn_dim": 64, "num_heads": 4, "num_layers": 3, "in_dim": 16, "out_dim": 16, "text_dim": 24}
_HUNYUAN = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 768,
    "context_in_dim": 24,
    "hidden_size": 96,
    "mlp_ratio": 2.0,
    "num_heads": 6,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6],
    "theta": 256,
    "patch_size": [1, 2, 2],
    "qkv_bias": True,
    "guidance_embed": True,
    "byt5": False,
    "meanflow": False,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
    "meanflow_sum": False,
}
_HUNYUAN_15 = {
    **_HUNYUAN,
    "in_channels": 33,
    "out_channels": 16,
    "vec_in_dim": None,
    "patch_size": [1, 1, 1],
    "guidance_embed": False,
    "byt5": True,
    "use_cond_type_embedding": True,
    "vision_in_dim": 20,
    "meanflow": True,
    "meanflow_sum": True,
}
_MINIMAX = {
    "hidden_size": 48,
    "num_layers": 2,
    "token_refiner_num_layers": 1,
    "num_attention_heads": 7,
    "attention_head_dim": 24,
    "ffn_hidden_size": 32,
    "latents_dim": 24,
    "audio_latents_dim": 32,
    "text_dim": 40,
    "timestep_input_dim": 16,
    "time_embed_hidden_size": 32,
    "time_embed_dim": 24,
    "rope_inv_freq_len": 4,
}


def heads(arguments: dict[str, Any], count: int, head_dim: int) -> dict[str, Any]:
    """The same model with another number of heads."""
    if "num_attention_heads" in arguments:
        return {**arguments, "num_attention_heads": count, "attention_head_dim": head_dim}
    width = "dim" if "dim" in arguments else "hidden_size"
    axes = {"axes_dim": [4, 6, head_dim - 10]} if "axes_dim" in arguments else {}
    return {**arguments, "num_heads": count, width: count * head_dim, **axes}


@contextmanager
def in_groups_of_heads() -> Iterator[None]:
    """As packs save memory: one attention after the other, 19, 19 and 18 of 56 heads."""
    import comfy.ldm.minimax.model as host

    whole = host.optimized_attention

    def grouped(q: Any, k: Any, v: Any, heads: int, **kwargs: Any) -> Tensor:
        q, k, v = (x if isinstance(x, Tensor) else x.take() for x in (q, k, v))
        groups = [part.tolist() for part in torch.arange(heads).tensor_split(3)]
        return torch.cat([whole(q[:, g], k[:, g], v[:, g], len(g), **kwargs) for g in groups], dim=-1)

    host.optimized_attention = grouped
    try:
        yield
    finally:
        host.optimized_attention = whole


_WAN_MODULE, _ANIMATE_MODULE = "comfy.ldm.wan.model", "comfy.ldm.wan.model_animate"
_HUNYUAN_MODULE, _MINIMAX_MODULE = "comfy.ldm.hunyuan_video.model", "comfy.ldm.minimax.model"
_INV_FREQ = {"rope.inv_freq": lambda: 10000.0 ** -(torch.arange(4) / 4)}
_I2V = {**_WAN, "in_dim": 36}
_CLIP = {"clip_fea": random(1, 257, 1280, seed=9)}

_HUNYUAN_FORWARDS = {
    "text": hunyuan,
    "no mask": lambda: hunyuan(mask=False),
    # the host itself takes a mask for one video only
    "two videos": lambda: hunyuan(video(16, 2, 6, 10, batch=2), mask=False),
    "token replace": lambda: hunyuan(guiding_frame_index=torch.tensor([0.0])),
    "reference": lambda: hunyuan(ref_latent=random(1, 16, 1, 10, 14, seed=8)),
    "reference and token replace": lambda: hunyuan(ref_latent=random(1, 16, 1, 10, 14, seed=8), guiding_frame_index=torch.tensor([0.0])),
    "ControlNet": lambda: hunyuan(control={"input": [random(1, 105, 96, seed=4), None], "output": [None, random(1, 105, 96, seed=5)]}),
    "three tokens": lambda: hunyuan(video(16, 1, 2, 6)),
}
_MINIMAX_FORWARDS = {"text": minimax, "keyframes": lambda: minimax(keyframes()), "references": lambda: minimax(references())}

FAMILIES: dict[str, Family] = {
    "VACE": Family(
        _WAN_MODULE,
        "VaceWanModel",
        {**_WAN, "model_type": "vace", "vace_layers": 3, "vace_in_dim": 96},
        {
            "one control": lambda: plain(video(16, 5, 10, 14), vace_context=random(1, 1, 96, 5, 10, 14, seed=4), vace_strength=[0.8]),
            "two controls": lambda: plain(
                video(16, 3, 6, 10, batch=2), vace_context=random(2, 2, 96, 3, 6, 10, seed=4), vace_strength=[0.8, 1.3]
            ),
        },
    ),
    "Camera": Family(
        _WAN_MODULE,
        "CameraWanModel",
        {**_I2V, "model_type": "camera"},
        {
            "camera": lambda: plain(video(36, 5, 10, 14), camera_conditions=random(1, 24, 5, 80, 112, seed=4), **_CLIP),
            "none": lambda: wan(36, **_CLIP),
        },
    ),
    "S2V": Family(
        _WAN_MODULE,
        "WanModel_S2V",
        {**_WAN, "model_type": "s2v", "num_heads": 4, "audio_dim": 24, "audio_inject_layers": [0, 2]},
        {
            "sound": lambda: plain(video(16, 5, 10, 14), audio_embed=random(1, 25, 24, 20, seed=4)),
            "sound, picture": lambda: plain(
                video(16, 5, 10, 14),
                audio_embed=random(1, 25, 24, 20, seed=4),
                reference_latent=random(1, 16, 1, 10, 14, seed=5),
                control_video=random(1, 16, 5, 10, 14, seed=6),
            ),
            "sound, picture, motion": lambda: plain(
                video(16, 3, 16, 24),
                audio_embed=random(1, 25, 24, 12, seed=4),
                reference_latent=random(1, 16, 1, 16, 24, seed=5),
                reference_motion=random(1, 16, 19, 16, 24, seed=6),
            ),
            "silent": lambda: plain(video(16, 3, 6, 10)),
        },
    ),
    "HuMo": Family(
        _WAN_MODULE,
        "HumoWanModel",
        {**_WAN, "model_type": "humo"},
        {
            "sound": lambda: plain(video(16, 3, 10, 14), audio_embed=random(1, 3, 8, 5, 1280, seed=4)),
            "sound, picture": lambda: plain(
                video(16, 3, 10, 14), audio_embed=random(1, 3, 8, 5, 1280, seed=4), reference_latent=random(1, 16, 1, 10, 14, seed=5)
            ),
            # as the host's node makes it: a frame more than the video has
            "no sound": lambda: plain(
                video(16, 3, 10, 14), audio_embed=torch.zeros(1, 4, 8, 5, 1280), reference_latent=random(1, 16, 1, 10, 14, seed=5)
            ),
        },
    ),
    "Animate": Family(
        _ANIMATE_MODULE,
        "AnimateWanModel",
        # its face encoder has one size only: a server test drives it once
        {**_I2V, "model_type": "animate", "num_layers": 5},
        {
            "pose": lambda: plain(video(36, 4, 10, 14), pose_latents=random(1, 16, 3, 10, 14, seed=4), **_CLIP),
        },
    ),
    "SCAIL": Family(
        _WAN_MODULE,
        "SCAILWanModel",
        {key: value for key, value in {**_WAN, "in_dim": 20}.items() if key != "model_type"},
        {
            "pose": lambda: plain(video(20, 3, 8, 12), pose_latents=random(1, 20, 3, 4, 6, seed=4), **_CLIP),
            "pose, picture": lambda: plain(
                video(20, 3, 8, 12),
                pose_latents=random(1, 20, 3, 4, 6, seed=4),
                reference_latent=random(1, 20, 1, 8, 12, seed=5),
                **_CLIP,
            ),
        },
    ),
    "SCAIL-2": Family(
        _WAN_MODULE,
        "SCAIL2WanModel",
        {key: value for key, value in {**_WAN, "in_dim": 20, "mask_in_dim": 28}.items() if key != "model_type"},
        {
            "pose, masks": lambda: plain(
                video(20, 3, 8, 12), pose_latents=random(1, 20, 3, 4, 6, seed=4), sam_latents=random(1, 28, 3, 4, 6, seed=6), **_CLIP
            ),
            # the masks of the references, then zeros over the video
            **{
                f"pose, picture, masks, {mode}": lambda flag=flag: plain(  # type: ignore[misc]
                    video(20, 3, 8, 12),
                    pose_latents=random(1, 20, 3, 4, 6, seed=4),
                    reference_latent=random(1, 20, 1, 8, 12, seed=5),
                    sam_latents=random(1, 28, 3, 4, 6, seed=6),
                    ref_mask_latents=random(1, 28, 4, 8, 12, seed=7),
                    ref_mask_flag=flag,
                    **_CLIP,
                )
                for mode, flag in (("animation", True), ("replacement", False))
            },
        },
    ),
    "HunyuanVideo": Family(_HUNYUAN_MODULE, "HunyuanVideo", _HUNYUAN, _HUNYUAN_FORWARDS),
    "HunyuanVideo 1.5": Family(
        _HUNYUAN_MODULE,
        "HunyuanVideo",
        _HUNYUAN_15,
        {
            "text": hunyuan_15,
            "byT5 and picture": lambda: hunyuan_15(txt_byt5=random(1, 5, 1472, seed=4), clip_fea=random(1, 6, 20, seed=5)),
        },
    ),
    "MiniMax-H3": Family(_MINIMAX_MODULE, "MiniMaxH3Model", _MINIMAX, _MINIMAX_FORWARDS, _INV_FREQ),
    "Kandinsky 5": Family(
        "comfy.ldm.kandinsky5.model",
        "Kandinsky5",
        {
            "in_text_dim": 24,
            "in_text_dim2": 20,
            "time_dim": 32,
            "model_dim": 96,
            "ff_dim": 64,
            "visual_embed_dim": 132,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (8, 12, 12),
        },
        {
            "text": lambda: plain(video(33, 3, 9, 13), y=random(1, 20, seed=3)),
            "first frame": lambda: plain(video(33, 3, 10, 14), y=random(1, 20, seed=3), time_dim_replace=random(1, 16, 1, 10, 14, seed=4)),
        },
    ),
    # head counts of the released models
    "MiniMax-H3, 56 heads": Family(_MINIMAX_MODULE, "MiniMaxH3Model", heads(_MINIMAX, 56, 24), {"text": minimax}, _INV_FREQ),
    "MiniMax-H3, 56 heads in groups": Family(
        _MINIMAX_MODULE, "MiniMaxH3Model", heads(_MINIMAX, 56, 24), {"text": minimax}, _INV_FREQ, in_groups_of_heads
    ),
    "HunyuanVideo, 24 heads": Family(_HUNYUAN_MODULE, "HunyuanVideo", heads(_HUNYUAN, 24, 16), {"text": hunyuan}),
    "HunyuanVideo 1.5, 16 heads": Family(_HUNYUAN_MODULE, "HunyuanVideo", heads(_HUNYUAN_15, 16, 16), {"text": hunyuan_15}),
    **VIDEOS,
    **PICTURES,
    **FURTHER,
}
