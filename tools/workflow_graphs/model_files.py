"""Where the releases publish the model files that the shipped workflows name."""

from __future__ import annotations

_WAN22 = "https://huggingface.co/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"
_WAN21 = "https://huggingface.co/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"
_LONGCAT = "https://huggingface.co/Kijai/LongCat-Video_comfy/resolve/main"
_AVATAR = "https://huggingface.co/Kijai/WanVideo_comfy/resolve/main/LongCat"
_LTX2 = "https://huggingface.co/Lightricks/LTX-2/resolve/main"
_LTX2_SPLIT = "https://huggingface.co/Comfy-Org/ltx-2/resolve/main/split_files"
_LTX23 = "https://huggingface.co/Lightricks/LTX-2.3/resolve/main"
_LTX23_SPLIT = "https://huggingface.co/Comfy-Org/ltx-2.3/resolve/main/split_files"

#: model file -> (folder below models/, where the release publishes it)
MODELS = {
    "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors": ("diffusion_models", f"{_WAN22}/diffusion_models"),
    "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors": ("diffusion_models", f"{_WAN22}/diffusion_models"),
    "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors": ("diffusion_models", f"{_WAN22}/diffusion_models"),
    "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors": ("diffusion_models", f"{_WAN22}/diffusion_models"),
    "wan2.2_ti2v_5B_fp16.safetensors": ("diffusion_models", f"{_WAN22}/diffusion_models"),
    "wan2.2_vae.safetensors": ("vae", f"{_WAN22}/vae"),
    "wan2.1_t2v_1.3B_fp16.safetensors": ("diffusion_models", f"{_WAN21}/diffusion_models"),
    "wan_2.1_vae.safetensors": ("vae", f"{_WAN21}/vae"),
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": ("text_encoders", f"{_WAN21}/text_encoders"),
    "LongCat_TI2V_comfy_fp8_e4m3fn_scaled_KJ.safetensors": ("diffusion_models", _LONGCAT),
    "LongCat_refinement_lora_rank128_bf16.safetensors": ("loras", _LONGCAT),
    "LongCat-Avatar-15_bf16.safetensors": ("diffusion_models", _AVATAR),
    "LongCat-Avatar-15_dmd_distill_lora_rank128_bf16.safetensors": ("loras", _AVATAR),
    "whisper_large_v3_fp16.safetensors": (
        "audio_encoders",
        "https://huggingface.co/Comfy-Org/HuMo_ComfyUI/resolve/main/split_files/audio_encoders",
    ),
    "ltx-2-19b-dev-fp8.safetensors": ("checkpoints", _LTX2),
    "gemma_3_12B_it_fp4_mixed.safetensors": ("text_encoders", f"{_LTX2_SPLIT}/text_encoders"),
    "ltx-2.3-22b-dev-fp8.safetensors": ("checkpoints", "https://huggingface.co/Lightricks/LTX-2.3-fp8/resolve/main"),
    "ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors": ("loras", f"{_LTX23_SPLIT}/loras"),
    "ltx-2.3-spatial-upscaler-x2-1.1.safetensors": ("latent_upscale_models", _LTX23),
}
