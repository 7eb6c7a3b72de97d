"""The models that benchmarks sample: their checkpoints, with random weights, and the shipped workflows that are shrunk to them."""

from __future__ import annotations

from typing import Any

from ..demo.checkpoints import LTXAV, WAN, Checkpoint
from ..demo.tiny import Tiny

_LTXAV: dict[str, Any] = {
    **LTXAV,
    "attention_head_dim": 64,
    "num_attention_heads": 10,
    "cross_attention_dim": 640,
    "num_layers": 2,
    "audio_attention_head_dim": 32,
    "audio_num_attention_heads": 10,
    "audio_cross_attention_dim": 320,
}
#: two layers each, large enough that a step is mostly computation
STEP_CHECKPOINTS: dict[str, Checkpoint] = {
    "bench_wan.safetensors": (
        "comfy.ldm.wan.model",
        "WanModel",
        {**WAN, "dim": 768, "ffn_dim": 2048, "num_heads": 6, "num_layers": 2},
        None,
    ),
    "bench_ltxav.safetensors": ("comfy.ldm.lightricks.av_model", "LTXAVModel", _LTXAV, _LTXAV),
}
#: 11 layers of Wan's shape at 1536 channels: 2 GB in fp32
LARGE = "bench_large.safetensors"
LARGE_CHECKPOINT: dict[str, Checkpoint] = {
    LARGE: ("comfy.ldm.wan.model", "WanModel", {**WAN, "dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 11}, None)
}

#: 9 x 15 x 17 tokens, for :data:`STEP_CHECKPOINTS`
STEP_WORKFLOWS = (
    Tiny(
        workflow="wan2.1_1.3B_t2v",
        title="WanModel in ComfyUI",
        files={"wan2.1_t2v_1.3B_fp16.safetensors": "bench_wan.safetensors"},
        text=(12, 4096),
        inputs={"width": 272, "height": 240, "length": 33, "cfg": 1.0, "sampler_name": "euler"},
        steps=0,
        tokens=2295,
    ),
    Tiny(
        workflow="ltx2_av_t2v",
        title="LTXAVModel in ComfyUI",
        files={"ltx-2-19b-dev-fp8.safetensors": "bench_ltxav.safetensors"},
        text=(16, 48),
        inputs={"width": 544, "height": 480, "length": 65, "frames_number": 65, "cfg": 1.0},
        steps=0,
        tokens=2295,
    ),
)
#: next to no computation, for a checkpoint of the demo
ONE_STEP = Tiny(
    workflow="wan2.1_1.3B_t2v",
    title="one step of a tiny Wan",
    files={"wan2.1_t2v_1.3B_fp16.safetensors": "tiny_wan_t2v.safetensors"},
    text=(12, 4096),
    inputs={"width": 112, "height": 80, "length": 9, "cfg": 1.0, "sampler_name": "euler", "steps": 1},
    steps=1,
    tokens=105,
)
