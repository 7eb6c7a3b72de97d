"""The shipped workflows of Wan."""

from __future__ import annotations

from .graph import Graph, Node, Wire
from .parts import (
    FOX,
    MODEL_COLUMN,
    OUTPUT_COLUMN,
    PATCH_COLUMN,
    PROMPT_COLUMN,
    SAMPLE_COLUMN,
    WAN_NEGATIVE,
    patch_node,
    prompts,
    saved_video,
    vae_patch_node,
)


def wan22_14b() -> Graph:
    graph = Graph(
        "wan2.2_14B_t2v",
        "## Wan 2.2 14B, text to video, on all GPUs\n\nEach of the two models gets its own **SP Model Patch**: the workers keep both. "
        "Everything else is the usual graph.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.\n\n"
        "A LoRA goes between the loader and SP Model Patch.",
    )
    models, clip, vae = _wan22_models(graph, "t2v")
    positive, negative = prompts(graph, clip[0], FOX, WAN_NEGATIVE)
    latent = graph.add("EmptyHunyuanLatentVideo", PROMPT_COLUMN, 540, None, (430, 140), width=832, height=480, length=81)
    patches = _wan22_patches(graph, models, shift=5.0)
    graph.group("Sequence parallel", PATCH_COLUMN - 20, -40, 330, 780)
    sampled = _wan22_sampling(graph, patches, positive[0], negative[0], latent[0])
    images = graph.add("VAEDecode", OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=vae[0])
    saved_video(graph, images[0], 16, "video/wan2.2_14B", 150)
    return graph


def wan22_14b_i2v() -> Graph:
    graph = Graph(
        "wan2.2_14B_i2v",
        "## Wan 2.2 14B, image to video, all of it on all GPUs\n\n**SP VAE Patch** has every GPU encode and decode a band of each frame, "
        "and each of the two models gets its own **SP Model Patch**. All three name the same `devices`, so one set of workers does "
        "it.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.\n\nA LoRA goes between the loader and SP Model Patch.",
    )
    models, clip, vae = _wan22_models(graph, "i2v")
    positive, negative = prompts(graph, clip[0], FOX, WAN_NEGATIVE)
    image = graph.add("LoadImage", MODEL_COLUMN, 640, "First frame", (360, 330), image="example.png")
    patches = _wan22_patches(graph, models, shift=5.0)
    shared = vae_patch_node(graph, vae[0], PATCH_COLUMN, 750)
    graph.group("Sequence parallel", PATCH_COLUMN - 20, -40, 330, 890)
    size = {"width": 832, "height": 480, "length": 81}
    wired = {"positive": positive[0], "negative": negative[0], "vae": shared[0], "start_image": image[0]}
    start = graph.add("WanImageToVideo", PROMPT_COLUMN, 540, None, (430, 210), **wired, **size)
    sampled = _wan22_sampling(graph, patches, start[0], start[1], start[2])
    images = graph.add("VAEDecode", OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=shared[0])
    saved_video(graph, images[0], 16, "video/wan2.2_14B_i2v", 150)
    return graph


def _wan22_models(graph: Graph, kind: str) -> tuple[tuple[Node, Node], Node, Node]:
    """The models for high and low noise, the text encoder, the VAE."""
    named = {part: f"wan2.2_{kind}_{part}_noise_14B_fp8_scaled.safetensors" for part in ("high", "low")}
    high = graph.add("UNETLoader", MODEL_COLUMN, 40, "High noise", (360, 90), unet_name=named["high"])
    low = graph.add("UNETLoader", MODEL_COLUMN, 180, "Low noise", (360, 90), unet_name=named["low"])
    clip = graph.add("CLIPLoader", MODEL_COLUMN, 320, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", MODEL_COLUMN, 480, None, (360, 60), vae_name="wan_2.1_vae.safetensors")
    graph.group("Models", MODEL_COLUMN - 20, -40, 400, 600)
    return (high, low), clip, vae


def _wan22_patches(graph: Graph, models: tuple[Node, Node], shift: float) -> tuple[Node, Node]:
    shift_high = graph.add("ModelSamplingSD3", PATCH_COLUMN, 40, None, (290, 60), model=models[0][0], shift=shift)
    shift_low = graph.add("ModelSamplingSD3", PATCH_COLUMN, 400, None, (290, 60), model=models[1][0], shift=shift)
    high = patch_node(graph, shift_high[0], PATCH_COLUMN, 150, "SP Model Patch (high noise)")
    return high, patch_node(graph, shift_low[0], PATCH_COLUMN, 510, "SP Model Patch (low noise)")


def _wan22_sampling(graph: Graph, models: tuple[Node, Node], positive: Wire, negative: Wire, latent: Wire) -> Node:
    common = {"positive": positive, "negative": negative, "steps": 20, "cfg": 3.5, "sampler_name": "euler", "scheduler": "simple"}
    first = graph.add(
        "KSamplerAdvanced",
        SAMPLE_COLUMN,
        40,
        "High noise steps",
        (340, 340),
        **{"model": models[0][0], "latent_image": latent, "noise_seed": 42, **common},
        add_noise="enable",
        start_at_step=0,
        end_at_step=10,
        return_with_leftover_noise="enable",
    )
    return graph.add(
        "KSamplerAdvanced",
        SAMPLE_COLUMN,
        440,
        "Low noise steps",
        (340, 340),
        **{"model": models[1][0], "latent_image": first[0], "noise_seed": 0, **common},
        add_noise="disable",
        start_at_step=10,
        end_at_step=10000,
        return_with_leftover_noise="disable",
    )


def wan22_5b() -> Graph:
    graph = Graph(
        "wan2.2_5B_ti2v",
        "## Wan 2.2 5B, text or image to video, on all GPUs\n\nFor image to video connect a Load Image to `start_image` of "
        "**Wan22ImageToVideoLatent**; the first frame then has a timestep of its own, and each GPU works on a tile of all frames.\n\n"
        "`devices`: `auto` takes every GPU, `0,1` takes these two.",
    )
    unet = graph.add("UNETLoader", MODEL_COLUMN, 40, None, (360, 90), unet_name="wan2.2_ti2v_5B_fp16.safetensors")
    clip = graph.add("CLIPLoader", MODEL_COLUMN, 180, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", MODEL_COLUMN, 340, None, (360, 60), vae_name="wan2.2_vae.safetensors")
    graph.group("Models", MODEL_COLUMN - 20, -40, 400, 460)
    positive, negative = prompts(graph, clip[0], FOX, WAN_NEGATIVE)
    latent = graph.add("Wan22ImageToVideoLatent", PROMPT_COLUMN, 540, None, (430, 170), vae=vae[0], width=1280, height=704, length=121)
    shift = graph.add("ModelSamplingSD3", PATCH_COLUMN, 40, None, (290, 60), model=unet[0], shift=8.0)
    patch = patch_node(graph, shift[0], PATCH_COLUMN, 150)
    graph.group("Sequence parallel", PATCH_COLUMN - 20, -40, 330, 410)
    sampled = graph.add(
        "KSampler",
        SAMPLE_COLUMN,
        40,
        None,
        (340, 280),
        model=patch[0],
        positive=positive[0],
        negative=negative[0],
        latent_image=latent[0],
        seed=42,
        steps=20,
        cfg=5.0,
        sampler_name="uni_pc",
        scheduler="simple",
    )
    images = graph.add("VAEDecode", OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=vae[0])
    saved_video(graph, images[0], 24, "video/wan2.2_5B", 150)
    return graph


def wan21() -> Graph:
    graph = Graph(
        "wan2.1_1.3B_t2v",
        "## Wan 2.1 1.3B, text to video, with SP Sampler\n\n**SP Sampler** is KSampler plus `devices`: it patches the model itself and "
        "reports how the work was split and what it cost.\n\nA model this small gains little from many GPUs; it is a quick first try.",
    )
    unet = graph.add("UNETLoader", MODEL_COLUMN, 40, None, (360, 90), unet_name="wan2.1_t2v_1.3B_fp16.safetensors")
    clip = graph.add("CLIPLoader", MODEL_COLUMN, 180, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", MODEL_COLUMN, 340, None, (360, 60), vae_name="wan_2.1_vae.safetensors")
    graph.group("Models", MODEL_COLUMN - 20, -40, 400, 460)
    positive, negative = prompts(graph, clip[0], FOX, WAN_NEGATIVE)
    latent = graph.add("EmptyHunyuanLatentVideo", PROMPT_COLUMN, 540, None, (430, 140), width=832, height=480, length=81)
    shift = graph.add("ModelSamplingSD3", PATCH_COLUMN, 40, None, (290, 60), model=unet[0], shift=8.0)
    sampled = graph.add(
        "SPSampler",
        SAMPLE_COLUMN,
        40,
        None,
        (340, 310),
        model=shift[0],
        positive=positive[0],
        negative=negative[0],
        latent_image=latent[0],
        seed=42,
        steps=30,
        cfg=6.0,
        sampler_name="uni_pc",
        scheduler="simple",
        devices="auto",
    )
    graph.group("Sequence parallel", SAMPLE_COLUMN - 20, -40, 380, 640)
    graph.add("PreviewAny", SAMPLE_COLUMN, 410, "Report", (340, 170), source=sampled[1])
    images = graph.add("VAEDecode", OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=vae[0])
    saved_video(graph, images[0], 16, "video/wan2.1_1.3B", 150)
    return graph
