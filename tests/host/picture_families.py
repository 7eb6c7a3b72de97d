"""Families of picture models. Of their forwards a plain run tries a part."""

from __future__ import annotations

from typing import Any

import torch
from host.family import Family
from host.family_inputs import plain, random, video
from torch import Tensor

_FLUX_MODULE, _LUMINA_MODULE = "comfy.ldm.flux.model", "comfy.ldm.lumina.model"
_FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 20,
    "context_in_dim": 24,
    "hidden_size": 96,
    "mlp_ratio": 2.0,
    "num_heads": 6,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
_FLUX2 = {
    **_FLUX,
    "vec_in_dim": None,
    "axes_dim": [4, 4, 4, 4],
    "patch_size": 1,
    "qkv_bias": False,
    "txt_ids_dims": [3],
    "global_modulation": True,
    "mlp_silu_act": True,
    "ops_bias": False,
    "default_ref_method": "index",
    "ref_index_scale": 10.0,
}
_CHROMA = {
    **{key: value for key, value in _FLUX.items() if key != "guidance_embed"},
    "in_channels": 64,
    "out_channels": 64,
    "vec_in_dim": 0,
    "in_dim": 64,
    "out_dim": 96,
    "hidden_dim": 32,
    "n_layers": 1,
}
_RADIANCE = {
    **_CHROMA,
    "in_channels": 3,
    "out_channels": 3,
    "nerf_hidden_size": 16,
    "nerf_mlp_ratio": 2,
    "nerf_depth": 1,
    "nerf_max_freqs": 4,
    "nerf_tile_size": 0,
    "nerf_final_head_type": "conv",
    "nerf_embedder_dtype": None,
    "use_x0": False,
    "use_sequential_txt_ids": True,
}
_QWEN = {
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 7,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
_LUMINA = {
    "dim": 96,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 6,
    "n_kv_heads": 3,
    "multiple_of": 16,
    "ffn_dim_multiplier": 1.0,
    "axes_dims": [4, 6, 6],
    "cap_feat_dim": 24,
    "in_channels": 16,
    "qk_norm": True,
}
_Z_IMAGE = {
    **_LUMINA,
    "dim": 288,
    "axes_dims": [16, 16, 16],
    "n_kv_heads": 6,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 4,
}
_SD3 = {
    "input_size": None,
    "in_channels": 16,
    "depth": 3,
    "adm_in_channels": 20,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 24, "out_features": 192}},
    "num_patches": 144,
    "pos_embed_max_size": 12,
    "qk_norm": "rms",
}


_OMNIGEN = {
    "hidden_size": 96,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 6,
    "num_kv_heads": 3,
    "multiple_of": 16,
    "axes_dim_rope": (4, 6, 6),
    "text_feat_dim": 24,
    "timestep_scale": 1000.0,
}
_BOOGU = {
    **{key: value for key, value in _OMNIGEN.items() if key != "text_feat_dim"},
    "num_double_stream_layers": 2,
    "instruction_feat_dim": 24,
}
_IDEOGRAM = {
    "in_channels": 16,
    "num_layers": 2,
    "num_attention_heads": 5,
    "attention_head_dim": 24,
    "intermediate_size": 64,
    "adaln_dim": 32,
    "llm_features_dim": 24,
    "mrope_section": (4, 4, 4),
}
_KREA = {"features": 96, "tdim": 16, "txtdim": 12, "heads": 6, "kvheads": 3, "layers": 2, "txtlayers": 2, "txtheads": 2, "txtkvheads": 2}
_JOY = {"hidden_size": 96, "num_attention_heads": 6, "text_dim": 24, "num_layers": 2, "rope_dim_list": [4, 6, 6]}
_LENS = {
    "in_channels": 32,
    "out_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 7,
    "enc_hidden_dim": 12,
    "axes_dims_rope": (4, 6, 6),
    "selected_layer_index": (0, 1),
}
_HIDREAM = {
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 6,
    "caption_channels": [24, 20],
    "text_emb_dim": 20,
    "num_routed_experts": 2,
    "num_activated_experts": 1,
    "axes_dims_rope": (4, 6, 6),
    "llama_layers": [0, 1, 1],
}
_AURA = {"dim": 96, "n_layers": 3, "n_double_layers": 1, "n_heads": 6, "global_conddim": 32, "cond_seq_dim": 24, "max_seq": 144}
_TEXT_MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])


def _picture(channels: int = 16, height: int = 9, width: int = 13, batch: int = 1) -> Tensor:
    """5 x 7 tokens of 2 x 2 places; height and width are not whole patches."""
    return random(batch, channels, height, width, seed=1)


def _flux(x: Tensor | None = None, **more: Any) -> dict[str, Any]:
    x = _picture() if x is None else x
    return plain(x, y=random(x.shape[0], 20, seed=3), guidance=torch.full((x.shape[0],), 3.5), **more)


def _references(channels: int = 16) -> dict[str, Any]:
    return {"ref_latents": [random(1, channels, 6, 10, seed=4), random(1, channels, 4, 4, seed=5)]}


def _control(tokens: int, width: int = 96) -> dict[str, Any]:
    """What a ControlNet adds behind some blocks, for the picture's tokens."""
    made = [random(1, tokens, width, seed=seed) for seed in (6, 7)]
    return {"control": {"input": [made[0], None], "output": [None, made[1]]}}


def _with(inputs: dict[str, Any], **names: str) -> dict[str, Any]:
    """The same inputs, some under other names."""
    return {names.get(name, name): value for name, value in inputs.items()}


def _qwen(*sizes: int, **more: Any) -> dict[str, Any]:
    return _with(plain(video(16, *(sizes or (1, 9, 13))), **more), timestep="timesteps")


def _lumina(**more: Any) -> dict[str, Any]:
    return _with(plain(_picture(), num_tokens=7, **more), timestep="timesteps")


def _hidream(**more: Any) -> dict[str, Any]:
    text = {"encoder_hidden_states_llama3": random(1, 2, 5, 20, seed=4), "y": random(1, 20, seed=3)}
    return _with(plain(_picture(), **text, **more), timestep="t")


def _joy(**more: Any) -> dict[str, Any]:
    return _with(plain(video(16, 1, 9, 13), **more), x="hidden_states")


def _sd3(x: Tensor | None = None, **more: Any) -> dict[str, Any]:
    x = _picture() if x is None else x
    return _with(plain(x, y=random(x.shape[0], 20, seed=3), **more), timestep="timesteps")


PICTURES: dict[str, Family] = {
    "Flux": Family(
        _FLUX_MODULE,
        "Flux",
        _FLUX,
        {
            "text": _flux,
            "two pictures": lambda: _flux(_picture(batch=2)),
            "references": lambda: _flux(**_references()),
            "references beside": lambda: _flux(**_references(), ref_latents_method="uxo"),
            "ControlNet": lambda: _flux(**_control(35), **_references()),
            "mask": lambda: _flux(attention_mask=random(1, 42, 42, seed=8)),
        },
        plain=(("references", 3), ("ControlNet", 2)),
    ),
    "Flux 2": Family(
        _FLUX_MODULE,
        "Flux",
        _FLUX2,
        {
            "text": lambda: _flux(_picture(16, 5, 7)),
            "references": lambda: _flux(_picture(16, 5, 7), **_references()),
            "clean references": lambda: _flux(_picture(16, 5, 7), **_references(), ref_latents_method="index_timestep_zero"),
        },
        plain=(("clean references", 3),),
    ),
    "Chroma": Family(
        "comfy.ldm.chroma.model",
        "Chroma",
        _CHROMA,
        {"text": _flux, "ControlNet": lambda: _flux(**_control(35)), "mask": lambda: _flux(attention_mask=random(1, 42, 42, seed=8))},
        plain=(("ControlNet", 3),),
    ),
    "Chroma Radiance": Family(
        "comfy.ldm.chroma_radiance.model",
        "ChromaRadiance",
        _RADIANCE,
        {"text": lambda: _flux(_picture(3, 10, 14))},
        plain=(("text", 3),),
    ),
    "Qwen-Image": Family(
        "comfy.ldm.qwen_image.model",
        "QwenImageTransformer2DModel",
        _QWEN,
        {
            "text": _qwen,
            "mask of the text": lambda: _qwen(attention_mask=_TEXT_MASK),
            "edit": lambda: _qwen(ref_latents=[random(1, 16, 1, 6, 10, seed=4), random(1, 16, 1, 5, 4, seed=5)]),
            "edit, clean references": lambda: _qwen(
                ref_latents=[random(1, 16, 1, 6, 10, seed=4)], ref_latents_method="index_timestep_zero"
            ),
            "ControlNet": lambda: _qwen(**_control(35, 112), ref_latents=[random(1, 16, 1, 6, 10, seed=4)]),
        },
        plain=(("edit, clean references", 3), ("mask of the text", 2)),
    ),
    "Qwen-Image Layered": Family(
        "comfy.ldm.qwen_image.model",
        "QwenImageTransformer2DModel",
        {**_QWEN, "use_additional_t_cond": True, "default_ref_method": "negative_index"},
        {"layers": lambda: _qwen(3, 9, 13, ref_latents=[random(1, 16, 1, 9, 13, seed=4)], additional_t_cond=torch.tensor([1]))},
        plain=(("layers", 3),),
    ),
    "Lumina 2": Family(_LUMINA_MODULE, "NextDiT", _LUMINA, {"text": _lumina}, plain=(("text", 3),)),
    "Z-Image": Family(
        _LUMINA_MODULE,
        "NextDiT",
        _Z_IMAGE,
        {
            "text": _lumina,
            "references": lambda: _lumina(
                ref_latents=[random(1, 16, 6, 10, seed=4), random(1, 16, 4, 4, seed=5)],
                ref_contexts=[random(1, 5, 24, seed=6), random(1, 3, 24, seed=7), random(1, 6, 24, seed=8)],
            ),
        },
        plain=(("references", 3),),
    ),
    "Z-Image in pixel space": Family(
        _LUMINA_MODULE,
        "NextDiTPixelSpace",
        {**_Z_IMAGE, "decoder_hidden_size": 16, "decoder_num_res_blocks": 1, "decoder_max_freqs": 2},
        {"text": _lumina},
        plain=(("text", 2),),
    ),
    "Stable Diffusion 3": Family(
        "comfy.ldm.modules.diffusionmodules.mmdit",
        "OpenAISignatureMMDITWrapper",
        _SD3,
        {"text": _sd3, "ControlNet": lambda: _sd3(control={"output": [random(1, 35, 192, seed=6), None]})},
        plain=(("ControlNet", 2),),
    ),
    "Stable Diffusion 3.5 medium": Family(
        "comfy.ldm.modules.diffusionmodules.mmdit",
        "OpenAISignatureMMDITWrapper",
        {**_SD3, "x_block_self_attn_layers": [0, 1]},
        {"text": _sd3, "two pictures": lambda: _sd3(_picture(batch=2))},
        plain=(("text", 3),),
    ),
    "HiDream": Family(
        "comfy.ldm.hidream.model",
        "HiDreamImageTransformer2DModel",
        _HIDREAM,
        {"text": _hidream, "another picture beside": lambda: _hidream(image_cond=random(1, 16, 9, 13, seed=6))},
        plain=(("text", 3),),
    ),
    "AuraFlow": Family("comfy.ldm.aura.mmdit", "MMDiT", _AURA, {"text": lambda: plain(_picture(4))}, plain=(("text", 3),)),
    "Omnigen 2": Family(
        "comfy.ldm.omnigen.omnigen2",
        "OmniGen2Transformer2DModel",
        _OMNIGEN,
        {"text": _lumina, "references": lambda: _lumina(**_references())},
        plain=(("references", 3),),
    ),
    "Boogu": Family(
        "comfy.ldm.boogu.model",
        "BooguTransformer2DModel",
        _BOOGU,
        {"text": _lumina, "references": lambda: _lumina(**_references())},
        plain=(("references", 3),),
    ),
    "Ideogram 4": Family(
        "comfy.ldm.ideogram4.model",
        "Ideogram4Transformer2DModel",
        _IDEOGRAM,
        {
            "text": lambda: _with(plain(_picture(16, 5, 7)), timestep="timesteps"),
            "mask": lambda: _with(plain(_picture(16, 5, 7), attention_mask=_TEXT_MASK), timestep="timesteps"),
        },
        plain=(("mask", 3),),
    ),
    "Krea 2": Family(
        "comfy.ldm.krea2.model",
        "SingleStreamDiT",
        _KREA,
        {
            "text": lambda: _with(plain(_picture()), timestep="timesteps"),
            "clean references": lambda: _with(
                plain(_picture(), **_references(), ref_latents_method="index_timestep_zero"), timestep="timesteps"
            ),
        },
        plain=(("clean references", 3),),
    ),
    "JoyImage": Family(
        "comfy.ldm.joyimage.model",
        "JoyImageTransformer3DModel",
        _JOY,
        {"text": _joy, "references": lambda: _joy(ref_latents=[random(1, 16, 1, 6, 10, seed=4)])},
        plain=(("references", 3),),
    ),
    "Lens": Family(
        "comfy.ldm.lens.model",
        "LensTransformer2DModel",
        _LENS,
        {
            "text": lambda: plain(_picture(32, 5, 7)),
            "mask": lambda: plain(_picture(32, 5, 7), attention_mask=_TEXT_MASK),
        },
        plain=(("mask", 3),),
    ),
    "Mage-Flow": Family(
        "comfy.ldm.mage_flow.model",
        "MageFlowTransformer2DModel",
        {**_QWEN, "in_channels": 16, "out_channels": 16},
        {"references": lambda: plain(_picture(16, 5, 7), **_references())},
        plain=(("references", 3),),
    ),
}
