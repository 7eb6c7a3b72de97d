"""The shipped workflows, as the graphs that they are: nodes, places, wires, model files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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

#: the negative prompt that the Wan release recommends
_WAN_NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
#: in English, as LongCat-Video's own demos have it
_LONGCAT_NEGATIVE = (
    "bright tones, overexposed, static, blurred details, subtitles, style, painting, still picture, gray overall, worst quality, "
    "low quality, JPEG artifacts, ugly, incomplete, extra fingers, poorly drawn hands, deformed limbs, cluttered background"
)
_LTX_NEGATIVE = "blurry, low quality, still frame, watermark, overlay, titles, subtitles"
_FOX = "A red fox trots through deep snow between pine trees, the camera follows at its side, morning light, powder snow flies up."
_HARBOUR = (
    "A fishing boat leaves a small harbour at dawn. The engine chugs, gulls cry, waves slap against the hull. The camera stands on "
    "the pier and slowly turns after the boat as it passes the lighthouse."
)
_SPEAKER = "A person looks into the camera and speaks calmly, the head moves a little, daylight, a plain background."
_SPEAKERS = "Two people talk calmly in turn and look into the camera, their heads move a little, daylight, a plain background."
_MODEL_COLUMN, _PROMPT_COLUMN, _PATCH_COLUMN, _SAMPLE_COLUMN, _OUTPUT_COLUMN = 0, 420, 900, 1240, 1640


@dataclass
class Node:
    """One node; ``node[i]`` is its i-th output."""

    id: int
    type: str
    pos: tuple[int, int]
    values: dict[str, Any]
    title: str | None = None
    size: tuple[int, int] | None = None
    #: what the frontend does to a seed after a run
    after: str = "fixed"

    def __getitem__(self, output: int) -> Wire:
        return Wire(self.id, output)


@dataclass(frozen=True)
class Wire:
    node: int
    output: int


@dataclass
class Graph:
    """One workflow; ``note`` is shown beside the nodes."""

    name: str
    note: str
    nodes: list[Node] = field(default_factory=list)
    groups: list[tuple[str, tuple[int, int, int, int]]] = field(default_factory=list)

    def add(self, type: str, x: int, y: int, title: str | None = None, size: tuple[int, int] | None = None, /, **values: Any) -> Node:
        self.nodes.append(Node(len(self.nodes) + 1, type, (x, y), values, title, size))
        return self.nodes[-1]

    def group(self, title: str, x: int, y: int, width: int, height: int) -> None:
        self.groups.append((title, (x, y, width, height)))


def all_graphs() -> list[Graph]:
    wan = [wan22_14b(), wan22_14b_i2v(), wan22_5b(), wan21()]
    return [*wan, ltx2(), ltx2_i2v(), ltx23(), longcat(), longcat_refine(), longcat_avatar(), longcat_avatar_two()]


def _patch(graph: Graph, model: Wire, x: int, y: int, title: str | None = None) -> Node:
    return graph.add("SPModelPatch", x, y, title, (290, 180), model=model, devices="auto")


def _vae_patch(graph: Graph, vae: Wire, x: int, y: int) -> Node:
    return graph.add("SPVAEPatch", x, y, None, (290, 80), vae=vae, devices="auto")


def _prompts(graph: Graph, clip: Wire, positive: str, negative: str) -> tuple[Node, Node]:
    first = graph.add("CLIPTextEncode", _PROMPT_COLUMN, 40, "Prompt", (430, 190), clip=clip, text=positive)
    second = graph.add("CLIPTextEncode", _PROMPT_COLUMN, 280, "Negative prompt", (430, 190), clip=clip, text=negative)
    graph.group("Prompt", _PROMPT_COLUMN - 20, -40, 470, 530)
    return first, second


def _guided_sampling(graph: Graph, model: Wire, positive: Wire, negative: Wire, sigmas: Wire, latent: Wire, cfg: float = 4.0) -> Node:
    """Guider, noise, sampler and SamplerCustomAdvanced, in the sampling column."""
    guider = graph.add("CFGGuider", _SAMPLE_COLUMN, 40, None, (340, 100), model=model, positive=positive, negative=negative, cfg=cfg)
    noise = graph.add("RandomNoise", _SAMPLE_COLUMN, 190, None, (340, 90), noise_seed=42)
    sampler = graph.add("KSamplerSelect", _SAMPLE_COLUMN, 330, None, (340, 60), sampler_name="euler")
    inputs = {"noise": noise[0], "guider": guider[0], "sampler": sampler[0], "sigmas": sigmas, "latent_image": latent}
    return graph.add("SamplerCustomAdvanced", _SAMPLE_COLUMN, 440, None, (340, 120), **inputs)


def _video(graph: Graph, images: Wire, fps: float, prefix: str, y: int, audio: Wire | None = None) -> None:
    sound = {} if audio is None else {"audio": audio}
    video = graph.add("CreateVideo", _OUTPUT_COLUMN, y, None, (270, 110), images=images, fps=fps, **sound)
    graph.add("SaveVideo", _OUTPUT_COLUMN + 310, 40, None, (440, 420), video=video[0], filename_prefix=prefix)


def wan22_14b() -> Graph:
    graph = Graph(
        "wan2.2_14B_t2v",
        "## Wan 2.2 14B, text to video, on all GPUs\n\nEach of the two models gets its own **SP Model Patch**: the workers keep both. "
        "Everything else is the usual graph.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.\n\n"
        "A LoRA goes between the loader and SP Model Patch.",
    )
    models, clip, vae = _wan22_models(graph, "t2v")
    positive, negative = _prompts(graph, clip[0], _FOX, _WAN_NEGATIVE)
    latent = graph.add("EmptyHunyuanLatentVideo", _PROMPT_COLUMN, 540, None, (430, 140), width=832, height=480, length=81)
    patches = _wan22_patches(graph, models, shift=5.0)
    graph.group("Sequence parallel", _PATCH_COLUMN - 20, -40, 330, 780)
    sampled = _wan22_sampling(graph, patches, positive[0], negative[0], latent[0])
    images = graph.add("VAEDecode", _OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=vae[0])
    _video(graph, images[0], 16, "video/wan2.2_14B", 150)
    return graph


def wan22_14b_i2v() -> Graph:
    graph = Graph(
        "wan2.2_14B_i2v",
        "## Wan 2.2 14B, image to video, all of it on all GPUs\n\n**SP VAE Patch** has every GPU encode and decode a band of each frame, "
        "and each of the two models gets its own **SP Model Patch**. All three name the same `devices`, so one set of workers does "
        "it.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.\n\nA LoRA goes between the loader and SP Model Patch.",
    )
    models, clip, vae = _wan22_models(graph, "i2v")
    positive, negative = _prompts(graph, clip[0], _FOX, _WAN_NEGATIVE)
    image = graph.add("LoadImage", _MODEL_COLUMN, 640, "First frame", (360, 330), image="example.png")
    patches = _wan22_patches(graph, models, shift=5.0)
    shared = _vae_patch(graph, vae[0], _PATCH_COLUMN, 750)
    graph.group("Sequence parallel", _PATCH_COLUMN - 20, -40, 330, 890)
    size = {"width": 832, "height": 480, "length": 81}
    wired = {"positive": positive[0], "negative": negative[0], "vae": shared[0], "start_image": image[0]}
    start = graph.add("WanImageToVideo", _PROMPT_COLUMN, 540, None, (430, 210), **wired, **size)
    sampled = _wan22_sampling(graph, patches, start[0], start[1], start[2])
    images = graph.add("VAEDecode", _OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=shared[0])
    _video(graph, images[0], 16, "video/wan2.2_14B_i2v", 150)
    return graph


def _wan22_models(graph: Graph, kind: str) -> tuple[tuple[Node, Node], Node, Node]:
    """The models for high and low noise, the text encoder, the VAE."""
    named = {part: f"wan2.2_{kind}_{part}_noise_14B_fp8_scaled.safetensors" for part in ("high", "low")}
    high = graph.add("UNETLoader", _MODEL_COLUMN, 40, "High noise", (360, 90), unet_name=named["high"])
    low = graph.add("UNETLoader", _MODEL_COLUMN, 180, "Low noise", (360, 90), unet_name=named["low"])
    clip = graph.add("CLIPLoader", _MODEL_COLUMN, 320, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", _MODEL_COLUMN, 480, None, (360, 60), vae_name="wan_2.1_vae.safetensors")
    graph.group("Models", _MODEL_COLUMN - 20, -40, 400, 600)
    return (high, low), clip, vae


def _wan22_patches(graph: Graph, models: tuple[Node, Node], shift: float) -> tuple[Node, Node]:
    shift_high = graph.add("ModelSamplingSD3", _PATCH_COLUMN, 40, None, (290, 60), model=models[0][0], shift=shift)
    shift_low = graph.add("ModelSamplingSD3", _PATCH_COLUMN, 400, None, (290, 60), model=models[1][0], shift=shift)
    high = _patch(graph, shift_high[0], _PATCH_COLUMN, 150, "SP Model Patch (high noise)")
    return high, _patch(graph, shift_low[0], _PATCH_COLUMN, 510, "SP Model Patch (low noise)")


def _wan22_sampling(graph: Graph, models: tuple[Node, Node], positive: Wire, negative: Wire, latent: Wire) -> Node:
    common = {"positive": positive, "negative": negative, "steps": 20, "cfg": 3.5, "sampler_name": "euler", "scheduler": "simple"}
    first = graph.add(
        "KSamplerAdvanced",
        _SAMPLE_COLUMN,
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
        _SAMPLE_COLUMN,
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
    unet = graph.add("UNETLoader", _MODEL_COLUMN, 40, None, (360, 90), unet_name="wan2.2_ti2v_5B_fp16.safetensors")
    clip = graph.add("CLIPLoader", _MODEL_COLUMN, 180, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", _MODEL_COLUMN, 340, None, (360, 60), vae_name="wan2.2_vae.safetensors")
    graph.group("Models", _MODEL_COLUMN - 20, -40, 400, 460)
    positive, negative = _prompts(graph, clip[0], _FOX, _WAN_NEGATIVE)
    latent = graph.add("Wan22ImageToVideoLatent", _PROMPT_COLUMN, 540, None, (430, 170), vae=vae[0], width=1280, height=704, length=121)
    shift = graph.add("ModelSamplingSD3", _PATCH_COLUMN, 40, None, (290, 60), model=unet[0], shift=8.0)
    patch = _patch(graph, shift[0], _PATCH_COLUMN, 150)
    graph.group("Sequence parallel", _PATCH_COLUMN - 20, -40, 330, 410)
    sampled = graph.add(
        "KSampler",
        _SAMPLE_COLUMN,
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
    images = graph.add("VAEDecode", _OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=vae[0])
    _video(graph, images[0], 24, "video/wan2.2_5B", 150)
    return graph


def wan21() -> Graph:
    graph = Graph(
        "wan2.1_1.3B_t2v",
        "## Wan 2.1 1.3B, text to video, with SP Sampler\n\n**SP Sampler** is KSampler plus `devices`: it patches the model itself and "
        "reports how the work was split and what it cost.\n\nA model this small gains little from many GPUs; it is a quick first try.",
    )
    unet = graph.add("UNETLoader", _MODEL_COLUMN, 40, None, (360, 90), unet_name="wan2.1_t2v_1.3B_fp16.safetensors")
    clip = graph.add("CLIPLoader", _MODEL_COLUMN, 180, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", _MODEL_COLUMN, 340, None, (360, 60), vae_name="wan_2.1_vae.safetensors")
    graph.group("Models", _MODEL_COLUMN - 20, -40, 400, 460)
    positive, negative = _prompts(graph, clip[0], _FOX, _WAN_NEGATIVE)
    latent = graph.add("EmptyHunyuanLatentVideo", _PROMPT_COLUMN, 540, None, (430, 140), width=832, height=480, length=81)
    shift = graph.add("ModelSamplingSD3", _PATCH_COLUMN, 40, None, (290, 60), model=unet[0], shift=8.0)
    sampled = graph.add(
        "SPSampler",
        _SAMPLE_COLUMN,
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
    graph.group("Sequence parallel", _SAMPLE_COLUMN - 20, -40, 380, 640)
    graph.add("PreviewAny", _SAMPLE_COLUMN, 410, "Report", (340, 170), source=sampled[1])
    images = graph.add("VAEDecode", _OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=vae[0])
    _video(graph, images[0], 16, "video/wan2.1_1.3B", 150)
    return graph


def longcat() -> Graph:
    graph = Graph(
        "longcat_video_ti2v",
        "## LongCat-Video, text or image to video, on all GPUs\n\nThis extension brings the model along; the stock loader reads it.\n\n"
        "**Image to video, or going on with a video**: connect it to `video` of **LongCat Latent**. **LongCat KV Cache** behind SP Model "
        "Patch then computes those frames once instead of in every step.\n\n**Distillation LoRA**: put it before SP Model Patch, choose "
        "the schedule `distill`, 16 steps, cfg 1.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.",
    )
    unet = graph.add("UNETLoader", _MODEL_COLUMN, 40, None, (360, 90), unet_name="LongCat_TI2V_comfy_fp8_e4m3fn_scaled_KJ.safetensors")
    clip = graph.add("CLIPLoader", _MODEL_COLUMN, 180, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", _MODEL_COLUMN, 340, None, (360, 60), vae_name="wan_2.1_vae.safetensors")
    graph.group("Models", _MODEL_COLUMN - 20, -40, 400, 460)
    positive, negative = _prompts(graph, clip[0], _FOX, _LONGCAT_NEGATIVE)
    latent = graph.add("SPLongCatLatent", _PROMPT_COLUMN, 540, None, (430, 180), vae=vae[0], width=832, height=480, length=93)
    patch = _patch(graph, unet[0], _PATCH_COLUMN, 40)
    guidance = graph.add("SPLongCatCFGZero", _PATCH_COLUMN, 280, None, (290, 40), model=patch[0])
    graph.group("Sequence parallel", _PATCH_COLUMN - 20, -40, 330, 380)
    sigmas = graph.add("SPLongCatSigmas", _PATCH_COLUMN, 400, None, (290, 140), schedule="base", steps=50, shift=12.0)
    sampled = _guided_sampling(graph, guidance[0], positive[0], negative[0], sigmas[0], latent[0])
    images = graph.add("VAEDecode", _OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=vae[0])
    _video(graph, images[0], 15, "video/longcat", 150)
    return graph


def longcat_refine() -> Graph:
    graph = Graph(
        "longcat_video_refine",
        "## LongCat-Video, a large video from a small one, on all GPUs\n\nThe second pass: 480p at 15 frames a second becomes 1280x768 at "
        "30. **LongCat Refine Latent** enlarges the video and puts a frame between any two; the refinement LoRA was trained with the "
        "`refine` schedule and **LongCat Block-Sparse Attention**, which computes one sixteenth of the attention.\n\n**Image to video**: "
        "connect the picture to `start`, so that the first frame stays sharp; of a video that went on, what it went on "
        "from.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.",
    )
    unet = graph.add("UNETLoader", _MODEL_COLUMN, 40, None, (360, 90), unet_name="LongCat_TI2V_comfy_fp8_e4m3fn_scaled_KJ.safetensors")
    lora = {"lora_name": "LongCat_refinement_lora_rank128_bf16.safetensors", "strength_model": 1.0}
    lora = graph.add("LoraLoaderModelOnly", _MODEL_COLUMN, 180, None, (360, 90), model=unet[0], **lora)
    clip = graph.add("CLIPLoader", _MODEL_COLUMN, 320, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", _MODEL_COLUMN, 480, None, (360, 60), vae_name="wan_2.1_vae.safetensors")
    graph.group("Models", _MODEL_COLUMN - 20, -40, 400, 600)
    positive, negative = _prompts(graph, clip[0], _FOX, _LONGCAT_NEGATIVE)
    video = graph.add("LoadVideo", _PROMPT_COLUMN, 540, "Small video", (430, 200), file="longcat_480p.mp4")
    frames = graph.add("GetVideoComponents", _PROMPT_COLUMN, 790, None, (430, 90), video=video[0])
    shared = _vae_patch(graph, vae[0], _PATCH_COLUMN, 420)
    latent = graph.add(
        "SPLongCatRefineLatent",
        _PATCH_COLUMN,
        560,
        None,
        (290, 150),
        vae=shared[0],
        video=frames[0],
        width=1280,
        height=768,
        double_frames=True,
    )
    patch = _patch(graph, lora[0], _PATCH_COLUMN, 40)
    sparse = graph.add("SPLongCatBlockSparse", _PATCH_COLUMN, 280, None, (290, 80), model=patch[0], sparsity=0.9375)
    graph.group("Sequence parallel", _PATCH_COLUMN - 20, -40, 330, 770)
    sigmas = graph.add("SPLongCatSigmas", _PATCH_COLUMN, 790, None, (290, 140), schedule="refine", steps=50, shift=12.0, refine_start=0.5)
    sampled = _guided_sampling(graph, sparse[0], positive[0], negative[0], sigmas[0], latent[0], cfg=1.0)
    images = graph.add("VAEDecode", _OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=shared[0])
    _video(graph, images[0], 30, "video/longcat_refined", 150)
    return graph


def longcat_avatar() -> Graph:
    graph = Graph(
        "longcat_avatar_ai2v",
        "## LongCat-Video-Avatar 1.5: a picture speaks, on all GPUs\n\nTwo pieces of 93 frames at 25 frames a second make 6.9 seconds; the "
        "second goes on behind the last 13 frames of the first. Speech should be the voice alone.\n\n"
        + _AVATAR_LONGER
        + _AVATAR_LORA
        + "**Two "
        "persons**: the workflow longcat_avatar_two_ai2v.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.",
    )
    audio, _, piece = _avatar_inputs(graph, _SPEAKER)
    _avatar_video(graph, piece, audio)
    return graph


def longcat_avatar_two() -> Graph:
    graph = Graph(
        "longcat_avatar_two_ai2v",
        "## LongCat-Video-Avatar 1.5: two persons speak, on all GPUs\n\n**Masks**: load the picture into all three Load Image nodes. Open "
        "*Person 1* in the mask editor, paint that person, save; the same for *Person 2*. What is neither is background.\n\n**Speech**: a "
        "file for each person, as long as the whole conversation and silent while the other speaks.\n\n"
        + _AVATAR_LONGER
        + _AVATAR_LORA
        + "**People "
        "who say nothing**: `audio_3` with silence and `mask_3`.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.",
    )
    audio, encoder, piece = _avatar_inputs(graph, _SPEAKERS)
    other = graph.add("LoadAudio", _PROMPT_COLUMN, 840, "Speech of person 2", (430, 140), audio="speech_2.wav")
    heard = graph.add("SPLongCatAvatarAudio", _PROMPT_COLUMN, 1030, None, (430, 60), audio_encoder=encoder, audio=other[0])
    both = graph.add("AudioMerge", _PROMPT_COLUMN, 1140, "Sound of the video", (430, 90), audio1=audio, audio2=other[0], merge_method="add")
    masks = [
        graph.add("LoadImage", _MODEL_COLUMN, y, f"Person {number}", (360, 330), image="example.png")[1]
        for number, y in ((1, 1090), (2, 1460))
    ]
    _avatar_video(graph, {**piece, "audio_2": heard[0], "mask_1": masks[0], "mask_2": masks[1]}, both[0])
    return graph


#: for the notes of both
_AVATAR_LONGER = (
    "**Longer speech**: select the second piece, from the lower LongCat Avatar Conditioning to *All frames so far*, copy it with Ctrl+C "
    "and paste it with Ctrl+Shift+V, which keeps its wires. Connect the *All frames so far* of the piece before to `previous_frames` of "
    "the new LongCat Avatar Conditioning and to `image1` of the new *All frames so far*, and this one to Create Video. Give each piece "
    "a seed of its own. Each adds 3.2 seconds. The speech is connected whole: the node finds the place by itself, and behind its end is "
    "silence. The page docs/longcat.md of this extension says more.\n\n"
)
_AVATAR_LORA = (
    "**Distillation LoRA**: 8 steps, both scales of the guiders at 1. Without it: schedule `base`, for pieces that go on `enhance_hf`, 50 "
    "steps, shift 7, both scales 4; a higher `cfg_cond2_negative` follows the speech more closely.\n\n"
)


def _avatar_inputs(graph: Graph, prompt: str) -> tuple[Wire, Wire, dict[str, Wire]]:
    """Speech of one person, the encoder that hears it, and what every piece of the video gets."""
    model, clip, vae, encoder, image = _avatar_models(graph)
    positive, negative = _prompts(graph, clip, prompt, _LONGCAT_NEGATIVE)
    audio = graph.add("LoadAudio", _PROMPT_COLUMN, 540, "Speech", (430, 140), audio="speech.wav")
    heard = graph.add("SPLongCatAvatarAudio", _PROMPT_COLUMN, 730, None, (430, 60), audio_encoder=encoder, audio=audio[0])
    piece = {"positive": positive[0], "negative": negative[0], "vae": vae, "audio_1": heard[0], "image": image, "model": model}
    return audio[0], encoder, piece


def _avatar_video(graph: Graph, piece: dict[str, Wire], audio: Wire) -> None:
    """Two pieces, the second behind the first, and the video of both."""
    patch = _patch(graph, piece.pop("model"), _PATCH_COLUMN, 40)
    cached = graph.add("SPLongCatKVCache", _PATCH_COLUMN, 270, None, (290, 60), model=patch[0], device="gpu")
    graph.group("Sequence parallel", _PATCH_COLUMN - 20, -40, 330, 390)
    sampler = graph.add("KSamplerSelect", _PATCH_COLUMN, 400, None, (290, 60), sampler_name="euler")
    sigmas = graph.add("SPLongCatSigmas", _PATCH_COLUMN, 510, None, (290, 140), schedule="avatar_distill", steps=8, shift=7.0)
    how = {"sampler": sampler[0], "sigmas": sigmas[0]}
    first = _avatar_piece(graph, 40, cached[0], piece, how, 42)
    second = _avatar_piece(graph, 1020, cached[0], {**piece, "previous_frames": first}, how, 43)
    new = graph.add("ImageFromBatch", _OUTPUT_COLUMN, 1020, "Cut off what repeats", (270, 90), image=second, batch_index=13, length=4096)
    joined = graph.add("ImageBatch", _OUTPUT_COLUMN, 1160, "All frames so far", (270, 60), image1=first, image2=new[0])
    _video(graph, joined[0], 25, "video/longcat_avatar", 150, audio)


def _avatar_models(graph: Graph) -> tuple[Wire, Wire, Wire, Wire, Wire]:
    """Model with LoRA, text encoder, VAE, audio encoder, picture."""
    unet = graph.add("UNETLoader", _MODEL_COLUMN, 40, None, (360, 90), unet_name="LongCat-Avatar-15_bf16.safetensors")
    lora = {"lora_name": "LongCat-Avatar-15_dmd_distill_lora_rank128_bf16.safetensors", "strength_model": 1.0}
    lora = graph.add("LoraLoaderModelOnly", _MODEL_COLUMN, 180, None, (360, 90), model=unet[0], **lora)
    clip = graph.add("CLIPLoader", _MODEL_COLUMN, 320, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", _MODEL_COLUMN, 480, None, (360, 60), vae_name="wan_2.1_vae.safetensors")
    sound = graph.add("AudioEncoderLoader", _MODEL_COLUMN, 590, None, (360, 60), audio_encoder_name="whisper_large_v3_fp16.safetensors")
    graph.group("Models", _MODEL_COLUMN - 20, -40, 400, 710)
    image = graph.add("LoadImage", _MODEL_COLUMN, 720, "First frame", (360, 330), image="example.png")
    return lora[0], clip[0], vae[0], sound[0], image[0]


def _avatar_piece(graph: Graph, y: int, model: Wire, piece: dict[str, Wire], how: dict[str, Wire], seed: int) -> Wire:
    """One piece of a video in the sampling column: its frames."""
    made = graph.add("SPLongCatAvatar", _SAMPLE_COLUMN, y, None, (340, 330), **piece, width=832, height=480, length=93)
    guidance = {"cond1": made[0], "cond2": made[1], "negative": made[2], "cfg_conds": 1.0, "cfg_cond2_negative": 1.0, "style": "regular"}
    guider = graph.add("DualCFGGuider", _SAMPLE_COLUMN, y + 380, None, (340, 160), model=model, **guidance)
    noise = graph.add("RandomNoise", _SAMPLE_COLUMN, y + 590, None, (340, 90), noise_seed=seed)
    given = {**how, "noise": noise[0], "guider": guider[0], "latent_image": made[3]}
    sampled = graph.add("SamplerCustomAdvanced", _SAMPLE_COLUMN, y + 730, None, (340, 120), **given)
    images = graph.add("VAEDecode", _SAMPLE_COLUMN, y + 890, None, (340, 60), samples=sampled[0], vae=piece["vae"])
    return images[0]


def _ltx_models(graph: Graph, checkpoint: str) -> tuple[Node, Node, Node]:
    loader = graph.add("CheckpointLoaderSimple", _MODEL_COLUMN, 40, None, (360, 110), ckpt_name=checkpoint)
    encoder = graph.add(
        "LTXAVTextEncoderLoader",
        _MODEL_COLUMN,
        200,
        None,
        (360, 120),
        text_encoder="gemma_3_12B_it_fp4_mixed.safetensors",
        ckpt_name=checkpoint,
    )
    audio_vae = graph.add("LTXVAudioVAELoader", _MODEL_COLUMN, 370, None, (360, 60), ckpt_name=checkpoint)
    return loader, encoder, audio_vae


def _ltx_latent(graph: Graph, audio_vae: Wire, width: int, height: int, fps: int, y: int) -> Node:
    video = graph.add("EmptyLTXVLatentVideo", _PROMPT_COLUMN, y, None, (430, 140), width=width, height=height, length=121)
    audio = graph.add(
        "LTXVEmptyLatentAudio", _PROMPT_COLUMN, y + 190, None, (430, 120), frames_number=121, frame_rate=float(fps), audio_vae=audio_vae
    )
    return graph.add("LTXVConcatAVLatent", _PROMPT_COLUMN, y + 360, None, (430, 60), video_latent=video[0], audio_latent=audio[0])


def _ltx_output(graph: Graph, sampled: Wire, vae: Wire, audio_vae: Wire, fps: int, prefix: str, tiled: bool = True) -> None:
    parts = graph.add("LTXVSeparateAVLatent", _OUTPUT_COLUMN, 40, None, (270, 60), av_latent=sampled)
    images = graph.add("VAEDecodeTiled" if tiled else "VAEDecode", _OUTPUT_COLUMN, 150, None, (270, 160), samples=parts[0], vae=vae)
    sound = graph.add("LTXVAudioVAEDecode", _OUTPUT_COLUMN, 360, None, (270, 60), samples=parts[1], audio_vae=audio_vae)
    _video(graph, images[0], fps, prefix, 470, sound[0])


def ltx2() -> Graph:
    graph = Graph(
        "ltx2_av_t2v",
        "## LTX-2, text to video with sound, on all GPUs\n\nThe video is split over the GPUs; the sound, which is short, is computed on "
        "each.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.\n\nWidth and height are multiples of 32, the length is a "
        "multiple of 8 plus 1. The three loaders read one file.",
    )
    loader, encoder, audio_vae = _ltx_models(graph, "ltx-2-19b-dev-fp8.safetensors")
    graph.group("Models", _MODEL_COLUMN - 20, -40, 400, 490)
    positive, negative = _prompts(graph, encoder[0], _HARBOUR, _LTX_NEGATIVE)
    latent = _ltx_latent(graph, audio_vae[0], 768, 512, 24, 540)
    patch = _patch(graph, loader[0], _PATCH_COLUMN, 40)
    graph.group("Sequence parallel", _PATCH_COLUMN - 20, -40, 330, 300)
    rate = graph.add("LTXVConditioning", _PATCH_COLUMN, 320, None, (290, 80), positive=positive[0], negative=negative[0], frame_rate=24.0)
    sigmas = graph.add("LTXVScheduler", _PATCH_COLUMN, 450, None, (290, 160), steps=20, latent=latent[0])
    sampled = _guided_sampling(graph, patch[0], rate[0], rate[1], sigmas[0], latent[0])
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
    graph.group("Models", _MODEL_COLUMN - 20, -40, 400, 490)
    positive, negative = _prompts(graph, encoder[0], _HARBOUR, _LTX_NEGATIVE)
    image = graph.add("LoadImage", _MODEL_COLUMN, 540, "First frame", (360, 330), image="example.png")
    shared = _vae_patch(graph, loader[2], _PATCH_COLUMN, 280)
    video = graph.add("EmptyLTXVLatentVideo", _PROMPT_COLUMN, 540, None, (430, 140), width=768, height=512, length=121)
    begun = graph.add("LTXVImgToVideoInplace", _PROMPT_COLUMN, 730, None, (430, 120), vae=shared[0], image=image[0], latent=video[0])
    audio = graph.add(
        "LTXVEmptyLatentAudio", _PROMPT_COLUMN, 900, None, (430, 120), frames_number=121, frame_rate=24.0, audio_vae=audio_vae[0]
    )
    latent = graph.add("LTXVConcatAVLatent", _PROMPT_COLUMN, 1070, None, (430, 60), video_latent=begun[0], audio_latent=audio[0])
    patch = _patch(graph, loader[0], _PATCH_COLUMN, 40)
    graph.group("Sequence parallel", _PATCH_COLUMN - 20, -40, 330, 420)
    rate = graph.add("LTXVConditioning", _PATCH_COLUMN, 440, None, (290, 80), positive=positive[0], negative=negative[0], frame_rate=24.0)
    sigmas = graph.add("LTXVScheduler", _PATCH_COLUMN, 570, None, (290, 160), steps=20, latent=latent[0])
    sampled = _guided_sampling(graph, patch[0], rate[0], rate[1], sigmas[0], latent[0])
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
        _MODEL_COLUMN,
        480,
        None,
        (360, 90),
        lora_name="ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors",
        strength_model=0.5,
        model=loader[0],
    )
    upscaler = graph.add(
        "LatentUpscaleModelLoader", _MODEL_COLUMN, 620, None, (360, 60), model_name="ltx-2.3-spatial-upscaler-x2-1.1.safetensors"
    )
    graph.group("Models", _MODEL_COLUMN - 20, -40, 400, 740)
    positive, negative = _prompts(graph, encoder[0], _HARBOUR, _LTX_NEGATIVE)
    latent = _ltx_latent(graph, audio_vae[0], 640, 352, 24, 540)
    patch = _patch(graph, lora[0], _PATCH_COLUMN, 40)
    graph.group("Sequence parallel", _PATCH_COLUMN - 20, -40, 330, 300)
    rate = graph.add("LTXVConditioning", _PATCH_COLUMN, 320, None, (290, 80), positive=positive[0], negative=negative[0], frame_rate=24.0)
    guider = graph.add("CFGGuider", _PATCH_COLUMN, 450, None, (290, 100), model=patch[0], positive=rate[0], negative=rate[1], cfg=1.0)
    sampler = graph.add("KSamplerSelect", _PATCH_COLUMN, 600, None, (290, 60), sampler_name="euler")
    noise = graph.add("RandomNoise", _PATCH_COLUMN, 710, None, (290, 90), noise_seed=42)
    first_sigmas = graph.add(
        "ManualSigmas",
        _SAMPLE_COLUMN,
        40,
        "Sigmas, stage 1",
        (340, 60),
        sigmas="1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0",
    )
    common = {"noise": noise[0], "guider": guider[0], "sampler": sampler[0]}
    first = graph.add(
        "SamplerCustomAdvanced", _SAMPLE_COLUMN, 150, "Stage 1", (340, 120), **common, sigmas=first_sigmas[0], latent_image=latent[0]
    )
    parts = graph.add("LTXVSeparateAVLatent", _SAMPLE_COLUMN, 320, None, (340, 60), av_latent=first[0])
    larger = graph.add(
        "LTXVLatentUpsampler", _SAMPLE_COLUMN, 430, None, (340, 80), samples=parts[0], upscale_model=upscaler[0], vae=loader[2]
    )
    joined = graph.add("LTXVConcatAVLatent", _SAMPLE_COLUMN, 560, None, (340, 60), video_latent=larger[0], audio_latent=parts[1])
    second_sigmas = graph.add("ManualSigmas", _SAMPLE_COLUMN, 670, "Sigmas, stage 2", (340, 60), sigmas="0.85, 0.7250, 0.4219, 0.0")
    second = graph.add(
        "SamplerCustomAdvanced", _SAMPLE_COLUMN, 780, "Stage 2", (340, 120), **common, sigmas=second_sigmas[0], latent_image=joined[0]
    )
    _ltx_output(graph, second[0], loader[2], audio_vae[0], 24, "video/ltx2.3")
    return graph
