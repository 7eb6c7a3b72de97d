"""Families of video models whose forwards a plain run tries in part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from host.family import Family
from host.family_inputs import causal, plain, random, video, wan
from torch import Tensor

_COGVIDEO = {
    "num_attention_heads": 7,
    "attention_head_dim": 16,
    "time_embed_dim": 32,
    "text_embed_dim": 24,
    "num_layers": 2,
    "max_text_seq_length": 7,
    "sample_width": 14,
    "sample_height": 10,
    "sample_frames": 9,
}
_COGVIDEO_MODULE = "comfy.ldm.cogvideo.model"


def _cogvideo(frames: int = 3, **more: Any) -> dict[str, Any]:
    return plain(video(16, frames, 10, 14), **more)


_MOCHI = {
    "patch_size": 2,
    "in_channels": 12,
    "hidden_size_x": 96,
    "hidden_size_y": 48,
    "depth": 2,
    "num_heads": 6,
    # the class knows one size of this layer
    "mlp_ratio_x": 128.0,
    "use_t5": True,
    "t5_feat_dim": 24,
    "t5_token_length": 7,
    "learn_sigma": False,
    "patch_embed_bias": True,
    "timestep_scale": 1000.0,
    "qk_norm": True,
    "qkv_bias": False,
    "out_bias": True,
}
_COSMOS = {
    "max_img_h": 64,
    "max_img_w": 64,
    "max_frames": 32,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "model_channels": 96,
    "num_blocks": 2,
    "num_heads": 6,
    "crossattn_emb_channels": 24,
    "pos_emb_cls": "rope3d",
    "use_adaln_lora": True,
    "adaln_lora_dim": 16,
}
_COSMOS1 = {
    **{name: _COSMOS[name] for name in ("max_img_h", "max_img_w", "max_frames", "in_channels", "out_channels")},
    **{name: _COSMOS[name] for name in ("patch_spatial", "patch_temporal", "model_channels", "num_blocks", "num_heads")},
    "crossattn_emb_channels": 24,
    "block_x_format": "THWBD",
    "pos_emb_cls": "rope3d",
    "use_adaln_lora": True,
    "adaln_lora_dim": 16,
    "affline_emb_norm": True,
    "extra_per_block_abs_pos_emb": True,
    "extra_per_block_abs_pos_emb_type": "learnable",
}
_ANIMATE2 = {"dim": 96, "ffn_dim": 64, "num_heads": 4, "num_layers": 3, "in_dim": 36, "out_dim": 16, "text_dim": 24}
_DANCER = {
    "dim": 96,
    "ffn_dim": 64,
    "num_heads": 6,
    "num_layers": 3,
    "in_dim": 36,
    "out_dim": 16,
    "text_dim": 24,
    "audio_inject_layers": [0, 2],
    "music_dim": 32,
    "music_heads": 2,
    "music_latent_dim": 32,
}


def _mochi(x: Tensor | None = None, tokens: int = 5) -> dict[str, Any]:
    """The model crops the text to ``tokens``."""
    x = video(12, 3, 10, 14) if x is None else x
    return plain(x, attention_mask=torch.ones(x.shape[0], 7, dtype=torch.bool), num_tokens=tokens)


def _cosmos(*sizes: int, per_frame: bool = False) -> dict[str, Any]:
    inputs = plain(video(16, *(sizes or (3, 9, 13))))
    timesteps = inputs.pop("timestep")
    return {**inputs, "timesteps": torch.linspace(0.0, 0.9, 3)[None] if per_frame else timesteps / 1000}


def _cosmos1(batch: int = 1) -> dict[str, Any]:
    inputs = plain(video(16, 3, 10, 14, batch=batch))
    return {**inputs, "timesteps": inputs.pop("timestep") / 1000, "fps": torch.tensor([24.0])}


def _animate2(poses: bool = True, **more: Any) -> dict[str, Any]:
    """Three frames behind the reference picture, 5 x 7 tokens each."""
    clip = {"clip_fea": random(1, 257, 1280, seed=9)}
    pose = {"pose_latents": random(1, 16, 3, 9, 13, seed=4), "context_pose": random(1, 5, 24, seed=5)} if poses else {}
    return plain(video(36, 4, 9, 13), **clip, **pose, **more)


def _cached_animate2() -> Iterator[dict[str, Any]]:
    """Two steps, of which the second finds the pose video's stream in the cache."""
    from comfy.ldm.wan.model_animate2 import PoseBranchCache

    cache = PoseBranchCache()
    for _ in range(2):
        yield {**_animate2(), "transformer_options": {"animate2_cache": cache}}


def _dancer(**more: Any) -> dict[str, Any]:
    """8 x 8 tokens a frame, of which each row of the music has equally many."""
    return plain(video(36, 3, 16, 16), audio_embed=random(1, 9, 35, seed=4), clip_fea=random(1, 257, 1280, seed=9), **more)


VIDEOS: dict[str, Family] = {
    "CogVideoX": Family(
        _COGVIDEO_MODULE,
        "CogVideoXTransformer3DModel",
        {**_COGVIDEO, "use_rotary_positional_embeddings": True},
        {"text": _cogvideo, "odd sizes": lambda: plain(video(16, 3, 9, 13, batch=2))},
        plain=(("text", 3),),
    ),
    "CogVideoX, learned positions": Family(
        _COGVIDEO_MODULE,
        "CogVideoXTransformer3DModel",
        {**_COGVIDEO, "num_attention_heads": 6, "use_learned_positional_embeddings": True},
        {"text": _cogvideo},
        plain=(),
    ),
    "CogVideoX 1.5": Family(
        _COGVIDEO_MODULE,
        "CogVideoXTransformer3DModel",
        {**_COGVIDEO, "in_channels": 32, "patch_size_t": 2, "ofs_embed_dim": 32, "use_rotary_positional_embeddings": True},
        {"first frame": lambda: plain(video(32, 5, 10, 14), ofs=torch.tensor([2.0]))},
        plain=(("first frame", 2),),
    ),
    "Mochi": Family(
        "comfy.ldm.genmo.joint_model.asymm_models_joint",
        "AsymmDiTJoint",
        _MOCHI,
        {"text": _mochi, "two videos": lambda: _mochi(video(12, 3, 6, 10, batch=2)), "all of the text": lambda: _mochi(tokens=256)},
        plain=(("text", 3),),
    ),
    "Cosmos Predict 2": Family(
        "comfy.ldm.cosmos.predict2",
        "MiniTrainDIT",
        _COSMOS,
        {"text": _cosmos, "timesteps": lambda: _cosmos(per_frame=True), "picture": lambda: _cosmos(1, 9, 13)},
        plain=(("timesteps", 3), ("text", 2)),
    ),
    "Cosmos Predict 2, positions in each block": Family(
        "comfy.ldm.cosmos.predict2",
        "MiniTrainDIT",
        {**_COSMOS, "extra_per_block_abs_pos_emb": True},
        {"text": _cosmos},
        plain=(),
    ),
    "Cosmos 1": Family(
        "comfy.ldm.cosmos.model",
        "GeneralDIT",
        _COSMOS1,
        {"text": _cosmos1, "two videos": lambda: _cosmos1(2)},
        plain=(("two videos", 3),),
    ),
    "Anima": Family(
        "comfy.ldm.anima.model",
        "Anima",
        _COSMOS,
        {"text": lambda: _cosmos(1, 9, 13)},
        smaller={"LLMAdapter": {"source_dim": 24, "target_dim": 24, "model_dim": 32, "num_layers": 1, "num_heads": 2}},
        plain=(("text", 3),),
    ),
    "Wan Animate 2": Family(
        "comfy.ldm.wan.model_animate2",
        "WanAnimate2Model",
        _ANIMATE2,
        {
            "poses": _animate2,
            "strengths": lambda: _animate2(pose_strength=0.7, reference_strength=1.3),
            "weaker picture": lambda: _animate2(poses=False, reference_strength=0.5),
            "cache": _cached_animate2,
        },
        plain=(("strengths", 3), ("cache", 2)),
    ),
    "Causal Wan": Family(
        "comfy.ldm.wan.ar_model",
        "CausalWanModel",
        {"dim": 96, "ffn_dim": 64, "num_heads": 4, "num_layers": 3, "in_dim": 16, "out_dim": 16, "text_dim": 24},
        {"frame by frame": causal, "two videos": lambda: causal(2), "all at once": wan},
        plain=(("frame by frame", 3), ("all at once", 2)),
    ),
    "WanDancer": Family(
        "comfy.ldm.wan.model_wandancer",
        "WanDancerModel",
        _DANCER,
        {
            "music": _dancer,
            "music, another frame rate": lambda: _dancer(fps=15.0, clip_fea_ref=random(1, 257, 1280, seed=8)),
            "silent": lambda: plain(video(36, 3, 9, 13)),
        },
        plain=(("music", 3),),
    ),
}
