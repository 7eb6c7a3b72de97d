"""The shipped workflows of LTX-2."""

from __future__ import annotations

from .graph import Graph, Node, Wire
from .parts import (
    HARBOUR,
    LTX_NEGATIVE,
    MODEL_COLUMN,
    OUTPUT_COLUMN,
    PATCH_COLUMN,
    PROMPT_COLUMN,
    SAMPLE_COLUMN,
    guided_sampling,
    patch_node,
    prompts,
    saved_video,
    vae_patch_node,
)


def _ltx_models(graph: Graph, checkpoint: str) -> tuple[Node, Node, Node]:
    loader = graph.add("CheckpointLoaderSimple", MODEL_COLUMN, 40, None, (360, 110), ckpt_name=checkpoint)
    encoder = graph.add(
        "LTXAVTextEncoderLoader",
        MODEL_COLUMN,
        200,
        None,
        (360, 120),
        text_encoder="gemma_3_12B_it_fp4_mixed.safetensors",
        ckpt_name=checkpoint,
    )
    audio_vae = graph.add("LTXVAudioVAELoader", MODEL_COLUMN, 370, None, (360, 60), ckpt_name=checkpoint)
    return loader, encoder, audio_vae


def _ltx_latent(graph: Graph, audio_vae: Wire, width: int, height: int, fps: int, y: int) -> Node:
    video = graph.add("EmptyLTXVLatentVideo", PROMPT_COLUMN, y, None, (430, 140), width=width, height=height, length=121)
    audio = graph.add(
        "LTXVEmptyLatentAudio", PROMPT_COLUMN, y + 190, None, (430, 120), frames_number=121, frame_rate=float(fps), audio_vae=audio_vae
    )
    return graph.add("LTXVConcatAVLatent", PROMPT_COLUMN, y + 360, None, (430, 60), video_latent=video[0], audio_latent=audio[0])


def _ltx_output(graph: Graph, sampled: Wire, vae: Wire, audio_vae: Wire, fps: int, prefix: str, tiled: bool = True) -> None:
    parts = graph.add("LTXVSeparateAVLatent", OUTPUT_COLUMN, 40, None, (270, 60), av_latent=sampled)
    images = graph.add("VAEDecodeTiled" if tiled else "VAEDecode", OUTPUT_COLUMN, 150, None, (270, 160), samples=parts[0], vae=vae)
    sound = graph.add("LTXVAudioVAEDecode", OUTPUT_COLUMN, 360, None, (270, 60), samples=parts[1], audio_vae=audio_vae)
    saved_video(graph, images[0], fps, prefix, 470, sound[0])


def ltx2() -> Graph:
    graph = Graph(
        "ltx2_av_t2v",
        "## LTX-2, text to video with sound, on all GPUs\n\nThe video is split over the GPUs; the sound, which is short, is computed on "
        "each.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.\n\nWidth and height are multiples of 32, the length is a "
        "multiple of 8 plus 1. The three loaders read one file.",
    )
    loader, encoder, audio_vae = _ltx_models(graph, "ltx-2-19b-dev-fp8.safetensors")
    graph.group("Models", MODEL_COLUMN - 20, -40, 400, 490)
    positive, negative = prompts(graph, encoder[0], HARBOUR, LTX_NEGATIVE)
    latent = _ltx_latent(graph, audio_vae[0], 768, 512, 24, 540)
    patch = patch_node(graph, loader[0], PATCH_COLUMN, 40)
    graph.group("Sequence parallel", PATCH_COLUMN - 20, -40, 330, 300)
    rate = graph.add("LTXVConditioning", PATCH_COLUMN, 320, None, (290, 80), positive=positive[0], negative=negative[0], frame_rate=24.0)
    sigmas = graph.add("LTXVScheduler", PATCH_COLUMN, 450, None, (290, 160), steps=20, latent=latent[0])
    sampled = guided_sampling(graph, patch[0], rate[0], rate[1], sigmas[0], latent[0])
    _ltx_output(graph, sampled[0], loader[2], audio_vae[0], 24, "video/ltx2")
    return graph


def ltx2_i2v() -> Graph:
    graph = Graph(
        "ltx2_av_i2v",
        "## LTX-2, image to video with sound, all of it on all GPUs\n\n**SP VAE Patch** has every GPU encode and decode a band of each "
        "frame, **SP Model Patch** does the sampling; both name the same `devices`, so one set of workers does it. The sound is decoded on "
        "one device.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.\n\nWidth and height are multiples of 32, the length "
        "is a multiple of 8 plus 1.",
    )
    loader, encoder, audio_vae = _ltx_models(graph, "ltx-2-19b-dev-fp8.safetensors")
    graph.group("Models", MODEL_COLUMN - 20, -40, 400, 490)
    positive, negative = prompts(graph, encoder[0], HARBOUR, LTX_NEGATIVE)
    image = graph.add("LoadImage", MODEL_COLUMN, 540, "First frame", (360, 330), image="example.png")
    shared = vae_patch_node(graph, loader[2], PATCH_COLUMN, 280)
    video = graph.add("EmptyLTXVLatentVideo", PROMPT_COLUMN, 540, None, (430, 140), width=768, height=512, length=121)
    begun = graph.add("LTXVImgToVideoInplace", PROMPT_COLUMN, 730, None, (430, 120), vae=shared[0], image=image[0], latent=video[0])
    audio = graph.add(
        "LTXVEmptyLatentAudio", PROMPT_COLUMN, 900, None, (430, 120), frames_number=121, frame_rate=24.0, audio_vae=audio_vae[0]
    )
    latent = graph.add("LTXVConcatAVLatent", PROMPT_COLUMN, 1070, None, (430, 60), video_latent=begun[0], audio_latent=audio[0])
    patch = patch_node(graph, loader[0], PATCH_COLUMN, 40)
    graph.group("Sequence parallel", PATCH_COLUMN - 20, -40, 330, 420)
    rate = graph.add("LTXVConditioning", PATCH_COLUMN, 440, None, (290, 80), positive=positive[0], negative=negative[0], frame_rate=24.0)
    sigmas = graph.add("LTXVScheduler", PATCH_COLUMN, 570, None, (290, 160), steps=20, latent=latent[0])
    sampled = guided_sampling(graph, patch[0], rate[0], rate[1], sigmas[0], latent[0])
    _ltx_output(graph, sampled[0], shared[0], audio_vae[0], 24, "video/ltx2_i2v", tiled=False)
    return graph


def ltx23() -> Graph:
    graph = Graph(
        "ltx2.3_av_t2v_distilled",
        "## LTX-2.3, text to video with sound, two stages, on all GPUs\n\nThe distilled LoRA lets 8 + 3 steps do. The second stage works "
        "on four times the tokens; one **SP Model Patch** serves both.\n\nThe LoRA stands before SP Model Patch: the workers load it too.",
    )
    loader, encoder, audio_vae = _ltx_models(graph, "ltx-2.3-22b-dev-fp8.safetensors")
    lora = graph.add(
        "LoraLoaderModelOnly",
        MODEL_COLUMN,
        480,
        None,
        (360, 90),
        lora_name="ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors",
        strength_model=0.5,
        model=loader[0],
    )
    upscaler = graph.add(
        "LatentUpscaleModelLoader", MODEL_COLUMN, 620, None, (360, 60), model_name="ltx-2.3-spatial-upscaler-x2-1.1.safetensors"
    )
    graph.group("Models", MODEL_COLUMN - 20, -40, 400, 740)
    positive, negative = prompts(graph, encoder[0], HARBOUR, LTX_NEGATIVE)
    latent = _ltx_latent(graph, audio_vae[0], 640, 352, 24, 540)
    patch = patch_node(graph, lora[0], PATCH_COLUMN, 40)
    graph.group("Sequence parallel", PATCH_COLUMN - 20, -40, 330, 300)
    rate = graph.add("LTXVConditioning", PATCH_COLUMN, 320, None, (290, 80), positive=positive[0], negative=negative[0], frame_rate=24.0)
    guider = graph.add("CFGGuider", PATCH_COLUMN, 450, None, (290, 100), model=patch[0], positive=rate[0], negative=rate[1], cfg=1.0)
    sampler = graph.add("KSamplerSelect", PATCH_COLUMN, 600, None, (290, 60), sampler_name="euler")
    noise = graph.add("RandomNoise", PATCH_COLUMN, 710, None, (290, 90), noise_seed=42)
    first_sigmas = graph.add(
        "ManualSigmas",
        SAMPLE_COLUMN,
        40,
        "Sigmas, stage 1",
        (340, 60),
        sigmas="1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0",
    )
    common = {"noise": noise[0], "guider": guider[0], "sampler": sampler[0]}
    first = graph.add(
        "SamplerCustomAdvanced", SAMPLE_COLUMN, 150, "Stage 1", (340, 120), **common, sigmas=first_sigmas[0], latent_image=latent[0]
    )
    parts = graph.add("LTXVSeparateAVLatent", SAMPLE_COLUMN, 320, None, (340, 60), av_latent=first[0])
    larger = graph.add(
        "LTXVLatentUpsampler", SAMPLE_COLUMN, 430, None, (340, 80), samples=parts[0], upscale_model=upscaler[0], vae=loader[2]
    )
    joined = graph.add("LTXVConcatAVLatent", SAMPLE_COLUMN, 560, None, (340, 60), video_latent=larger[0], audio_latent=parts[1])
    second_sigmas = graph.add("ManualSigmas", SAMPLE_COLUMN, 670, "Sigmas, stage 2", (340, 60), sigmas="0.85, 0.7250, 0.4219, 0.0")
    second = graph.add(
        "SamplerCustomAdvanced", SAMPLE_COLUMN, 780, "Stage 2", (340, 120), **common, sigmas=second_sigmas[0], latent_image=joined[0]
    )
    _ltx_output(graph, second[0], loader[2], audio_vae[0], 24, "video/ltx2.3")
    return graph
