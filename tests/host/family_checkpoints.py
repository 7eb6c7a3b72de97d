"""Tiny checkpoints of the families, as small as their detection in the host allows; written for the module that needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

_WAN = {"dim": 384, "ffn_dim": 256, "num_heads": 3, "num_layers": 2, "in_dim": 16, "out_dim": 16}
_WAN_MODULE = "comfy.ldm.wan.model"
_HUNYUAN_MODULE = "comfy.ldm.hunyuan_video.model"
_HUNYUAN = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 768,
    "context_in_dim": 64,
    "hidden_size": 384,
    "mlp_ratio": 4.0,
    "num_heads": 3,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [16, 56, 56],
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
    "in_channels": 65,
    "out_channels": 32,
    "vec_in_dim": None,
    "patch_size": [1, 1, 1],
    "guidance_embed": False,
    "byt5": True,
    "use_cond_type_embedding": True,
    "vision_in_dim": 1152,
    "meanflow_sum": True,
}
_MINIMAX = {
    "hidden_size": 96,
    "num_layers": 2,
    "token_refiner_num_layers": 1,
    "num_attention_heads": 7,
    "attention_head_dim": 32,
    "ffn_hidden_size": 64,
    "latents_dim": 24,
    "audio_latents_dim": 32,
    "text_dim": 40,
    "timestep_input_dim": 16,
    "time_embed_hidden_size": 32,
    "time_embed_dim": 24,
    "rope_inv_freq_len": 4,
}
_UNET_MODULE = "comfy.ldm.modules.diffusionmodules.openaimodel"
#: as Stable Diffusion 1.5, which the host knows by the width of its first level and its text
_UNET = {
    "image_size": 32,
    "in_channels": 4,
    "model_channels": 320,
    "out_channels": 4,
    "num_res_blocks": [1],
    "channel_mult": [1],
    "transformer_depth": [1],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1],
    "num_heads": 8,
    "use_spatial_transformer": True,
    "context_dim": 768,
    "legacy": False,
}

#: as CHECKPOINTS
FAMILY_CHECKPOINTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any] | None]] = {
    "tiny_vace": (_WAN_MODULE, "VaceWanModel", {**_WAN, "model_type": "vace", "vace_layers": 2, "vace_in_dim": 96}, None),
    "tiny_camera": (_WAN_MODULE, "CameraWanModel", {**_WAN, "model_type": "camera", "in_dim": 32}, None),
    "tiny_camera22": (_WAN_MODULE, "CameraWanModel", {**_WAN, "model_type": "camera_2.2", "in_dim": 36}, None),
    # control video and start picture beside the latent
    "tiny_fun_control": (_WAN_MODULE, "WanModel", {**_WAN, "model_type": "i2v", "in_dim": 48}, None),
    "tiny_s2v": (_WAN_MODULE, "WanModel_S2V", {**_WAN, "model_type": "s2v"}, None),
    "tiny_humo": (_WAN_MODULE, "HumoWanModel", {**_WAN, "model_type": "humo"}, None),
    "tiny_animate": (
        "comfy.ldm.wan.model_animate",
        "AnimateWanModel",
        {**_WAN, "model_type": "animate", "in_dim": 36, "num_layers": 5},
        None,
    ),
    "tiny_scail": (_WAN_MODULE, "SCAILWanModel", {**_WAN, "in_dim": 20}, None),
    "tiny_hunyuan": (_HUNYUAN_MODULE, "HunyuanVideo", _HUNYUAN, None),
    "tiny_hunyuan_i2v": (_HUNYUAN_MODULE, "HunyuanVideo", {**_HUNYUAN, "in_channels": 33}, None),
    "tiny_hunyuan15": (_HUNYUAN_MODULE, "HunyuanVideo", _HUNYUAN_15, None),
    # a picture model without a plan
    "tiny_unet": (_UNET_MODULE, "UNetModel", _UNET, None),
    "tiny_minimax": ("comfy.ldm.minimax.model", "MiniMaxH3Model", _MINIMAX, None),
}


def write_families(comfyui: Path, base: Path, names: list[str]) -> None:
    """Write those that are not there yet, in a process of its own: the host wants to be imported first."""
    folder = base / "models" / "diffusion_models"
    missing = [name for name in names if not (folder / f"{name}.safetensors").exists()]
    if missing:
        script = Path(__file__).with_name("checkpoints.py")
        subprocess.run([sys.executable, str(script), str(comfyui), str(folder), *missing], check=True)
