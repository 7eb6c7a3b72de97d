"""LongCat-Video checkpoints: the names of their keys, and the configuration that they imply.

Two sets of names are in use. The official one fuses q, k, v (and the text's k, v) into one
projection; the re-keyed one has them apart and uses Wan's names. Names are translated to
the official ones; fused or apart stays as it is, so that no weight is copied and no
quantisation scale has to be divided.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

#: re-keyed module -> official module, outside the blocks
_TOP = {
    "patch_embedding": "x_embedder.proj",
    "time_embedding.mlp": "t_embedder.mlp",
    "text_embedding": "y_embedder.y_proj",
    "head.modulation": "final_layer.adaLN_modulation",
    "head.head": "final_layer.linear",
    "multitalk_audio_proj": "audio_proj",
}
#: and inside a block; q, k and v that official checkpoints fuse get the names that fit beside theirs
_BLOCK = {
    "modulation": "adaLN_modulation",
    "norm3": "pre_crs_attn_norm",
    "self_attn.q": "attn.q",
    "self_attn.k": "attn.k",
    "self_attn.v": "attn.v",
    "self_attn.o": "attn.proj",
    "self_attn.norm_q": "attn.q_norm",
    "self_attn.norm_k": "attn.k_norm",
    "cross_attn.q": "cross_attn.q_linear",
    "cross_attn.k": "cross_attn.k_linear",
    "cross_attn.v": "cross_attn.v_linear",
    "cross_attn.o": "cross_attn.proj",
    "cross_attn.norm_q": "cross_attn.q_norm",
    "cross_attn.norm_k": "cross_attn.k_norm",
    "audio_modulation": "audio_adaLN_modulation",
    "norm_x": "pre_video_crs_attn_norm",
}
#: fused module -> its parts, in the order of the fused rows
FUSED = {
    "attn.qkv": ("attn.q", "attn.k", "attn.v"),
    "cross_attn.kv_linear": ("cross_attn.k_linear", "cross_attn.v_linear"),
}
#: a LoRA may have matrices of their own for these, too, which every checkpoint fuses
FUSED_IN_LORA = {**FUSED, "audio_cross_attn.kv_linear": ("audio_cross_attn.k_linear", "audio_cross_attn.v_linear")}
#: transformers that are told apart
VIDEO, AVATAR = "longcat_video", "longcat_avatar"
#: layers whose shapes tell the configuration
_NEEDED = (
    "x_embedder.proj",
    "t_embedder.mlp.0",
    "y_embedder.y_proj.0",
    "blocks.0.attn.q_norm",
    "blocks.0.ffn.w1",
    "final_layer.linear",
)
#: and that of the Avatar's audio layers
_AVATAR_NEEDED = ("audio_proj.proj1", "audio_proj.proj3", "audio_proj.norm", "blocks.0.audio_cross_attn.kv_linear")
#: audio features around a frame that the Avatar's first layer takes
_AUDIO_WINDOW = 5
_IN_BLOCK = re.compile(r"(blocks\.\d+\.)(.+)")


def _translate(name: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def official_name(name: str) -> str:
    """Official name of a key or module path of either set; other names stay."""
    block = _IN_BLOCK.fullmatch(name)
    return block[1] + _translate(block[2], _BLOCK) if block else _translate(name, _TOP)


def rekeyed_name(name: str) -> str:
    """The re-keyed name of an official key or module path whose projections are apart."""
    block = _IN_BLOCK.fullmatch(name)
    tables = [{new: old for old, new in table.items()} for table in (_TOP, _BLOCK)]
    return block[1] + _translate(block[2], tables[1]) if block else _translate(name, tables[0])


def to_official(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors under official names, quantisation scales and all."""
    return {official_name(key): value for key, value in state_dict.items()}


def fused_parts(module: str, table: Mapping[str, tuple[str, ...]] = FUSED) -> list[str]:
    """Paths of the projections in a fused one, e.g. of ``blocks.3.attn.qkv``; empty for any other module."""
    for fused, parts in table.items():
        if module.endswith(f".{fused}"):
            stem = module[: -len(fused)]
            return [stem + part for part in parts]
    return []


def detect(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any] | None:
    """Constructor arguments of the model that a checkpoint holds, None when it is not LongCat-Video.

    Every size is read from the tensors' shapes: head size from the per-head norm. The Avatar's
    checkpoints have audio layers beside all that the base has.

    Args:
        state_dict: keys of either set behind ``prefix``; only shapes are looked at.
    """
    if not _looks_like_it(state_dict, prefix):
        return None
    shapes = {official_name(key[len(prefix) :]): value.shape for key, value in state_dict.items() if key.startswith(prefix)}
    avatar = any("audio" in key for key in shapes)
    needed = (*_NEEDED, *_AVATAR_NEEDED) if avatar else _NEEDED
    # a norm of the audio tokens is an option of the Avatar that no published checkpoint has
    if any(f"{layer}.weight" not in shapes for layer in needed) or "blocks.0.pre_audio_crs_attn_norm.weight" in shapes:
        return None
    hidden_size, in_channels, *patch_size = shapes["x_embedder.proj.weight"]
    patch = patch_size[0] * patch_size[1] * patch_size[2]
    return {
        "image_model": AVATAR if avatar else VIDEO,
        "hidden_size": hidden_size,
        "num_heads": hidden_size // shapes["blocks.0.attn.q_norm.weight"][0],
        "depth": _count_blocks(shapes),
        "in_channels": in_channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // patch,
        "patch_size": tuple(patch_size),
        "ffn_hidden_size": shapes["blocks.0.ffn.w1.weight"][0],
        "adaln_tembed_dim": shapes["t_embedder.mlp.0.weight"][0],
        "frequency_embedding_size": shapes["t_embedder.mlp.0.weight"][1],
        "caption_channels": shapes["y_embedder.y_proj.0.weight"][1],
        "fused_qkv": "blocks.0.attn.qkv.weight" in shapes,
        "fused_kv": "blocks.0.cross_attn.kv_linear.weight" in shapes,
        **(_audio_sizes(shapes) if avatar else {}),
    }


def _audio_sizes(shapes: Mapping[str, Any]) -> dict[str, int]:
    """Avatar 1.0 and 1.5 have the same layers; how many features a frame has tells which one it is."""
    dim = shapes["audio_proj.norm.weight"][0]
    return {
        "audio_features": shapes["audio_proj.proj1.weight"][1] // _AUDIO_WINDOW,
        "audio_hidden": shapes["audio_proj.proj1.weight"][0],
        "audio_dim": dim,
        "audio_tokens": shapes["audio_proj.proj3.weight"][0] // dim,
    }


def _looks_like_it(state_dict: Mapping[str, Any], prefix: str) -> bool:
    rekeyed = ("head.modulation.1.weight", "blocks.0.modulation.1.weight")
    official = ("blocks.0.adaLN_modulation.1.weight", "blocks.0.cross_attn.q_linear.weight")
    return any(all(f"{prefix}{key}" in state_dict for key in keys) for keys in (rekeyed, official))


def _count_blocks(names: Iterable[str]) -> int:
    return 1 + max(int(name.split(".")[1]) for name in names if name.startswith("blocks."))
