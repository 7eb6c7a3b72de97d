"""The shipped workflows of LongCat-Video."""

from __future__ import annotations

from .graph import Graph, Wire
from .parts import (
    FOX,
    LONGCAT_NEGATIVE,
    MODEL_COLUMN,
    OUTPUT_COLUMN,
    PATCH_COLUMN,
    PROMPT_COLUMN,
    SAMPLE_COLUMN,
    SPEAKER,
    SPEAKERS,
    guided_sampling,
    patch_node,
    prompts,
    saved_video,
    vae_patch_node,
)


def longcat() -> Graph:
    graph = Graph(
        "longcat_video_ti2v",
        "## LongCat-Video, text or image to video, on all GPUs\n\nThis extension brings the model along; the stock loader reads it.\n\n"
        "**Image to video, or going on with a video**: connect it to `video` of **LongCat Latent**. **LongCat KV Cache** behind SP Model "
        "Patch then computes those frames once instead of in every step.\n\n**Distillation LoRA**: put it before SP Model Patch, choose "
        "the schedule `distill`, 16 steps, cfg 1.\n\n`devices`: `auto` takes every GPU, `0,1` takes these two.",
    )
    unet = graph.add("UNETLoader", MODEL_COLUMN, 40, None, (360, 90), unet_name="LongCat_TI2V_comfy_fp8_e4m3fn_scaled_KJ.safetensors")
    clip = graph.add("CLIPLoader", MODEL_COLUMN, 180, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", MODEL_COLUMN, 340, None, (360, 60), vae_name="wan_2.1_vae.safetensors")
    graph.group("Models", MODEL_COLUMN - 20, -40, 400, 460)
    positive, negative = prompts(graph, clip[0], FOX, LONGCAT_NEGATIVE)
    latent = graph.add("SPLongCatLatent", PROMPT_COLUMN, 540, None, (430, 180), vae=vae[0], width=832, height=480, length=93)
    patch = patch_node(graph, unet[0], PATCH_COLUMN, 40)
    guidance = graph.add("SPLongCatCFGZero", PATCH_COLUMN, 280, None, (290, 40), model=patch[0])
    graph.group("Sequence parallel", PATCH_COLUMN - 20, -40, 330, 380)
    sigmas = graph.add("SPLongCatSigmas", PATCH_COLUMN, 400, None, (290, 140), schedule="base", steps=50, shift=12.0)
    sampled = guided_sampling(graph, guidance[0], positive[0], negative[0], sigmas[0], latent[0])
    images = graph.add("VAEDecode", OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=vae[0])
    saved_video(graph, images[0], 15, "video/longcat", 150)
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
    unet = graph.add("UNETLoader", MODEL_COLUMN, 40, None, (360, 90), unet_name="LongCat_TI2V_comfy_fp8_e4m3fn_scaled_KJ.safetensors")
    lora = {"lora_name": "LongCat_refinement_lora_rank128_bf16.safetensors", "strength_model": 1.0}
    lora = graph.add("LoraLoaderModelOnly", MODEL_COLUMN, 180, None, (360, 90), model=unet[0], **lora)
    clip = graph.add("CLIPLoader", MODEL_COLUMN, 320, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", MODEL_COLUMN, 480, None, (360, 60), vae_name="wan_2.1_vae.safetensors")
    graph.group("Models", MODEL_COLUMN - 20, -40, 400, 600)
    positive, negative = prompts(graph, clip[0], FOX, LONGCAT_NEGATIVE)
    video = graph.add("LoadVideo", PROMPT_COLUMN, 540, "Small video", (430, 200), file="longcat_480p.mp4")
    frames = graph.add("GetVideoComponents", PROMPT_COLUMN, 790, None, (430, 90), video=video[0])
    shared = vae_patch_node(graph, vae[0], PATCH_COLUMN, 420)
    latent = graph.add(
        "SPLongCatRefineLatent",
        PATCH_COLUMN,
        560,
        None,
        (290, 150),
        vae=shared[0],
        video=frames[0],
        width=1280,
        height=768,
        double_frames=True,
    )
    patch = patch_node(graph, lora[0], PATCH_COLUMN, 40)
    sparse = graph.add("SPLongCatBlockSparse", PATCH_COLUMN, 280, None, (290, 80), model=patch[0], sparsity=0.9375)
    graph.group("Sequence parallel", PATCH_COLUMN - 20, -40, 330, 770)
    sigmas = graph.add("SPLongCatSigmas", PATCH_COLUMN, 790, None, (290, 140), schedule="refine", steps=50, shift=12.0, refine_start=0.5)
    sampled = guided_sampling(graph, sparse[0], positive[0], negative[0], sigmas[0], latent[0], cfg=1.0)
    images = graph.add("VAEDecode", OUTPUT_COLUMN, 40, None, (270, 60), samples=sampled[0], vae=shared[0])
    saved_video(graph, images[0], 30, "video/longcat_refined", 150)
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
    audio, _, piece = _avatar_inputs(graph, SPEAKER)
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
    audio, encoder, piece = _avatar_inputs(graph, SPEAKERS)
    other = graph.add("LoadAudio", PROMPT_COLUMN, 840, "Speech of person 2", (430, 140), audio="speech_2.wav")
    heard = graph.add("SPLongCatAvatarAudio", PROMPT_COLUMN, 1030, None, (430, 60), audio_encoder=encoder, audio=other[0])
    both = graph.add("AudioMerge", PROMPT_COLUMN, 1140, "Sound of the video", (430, 90), audio1=audio, audio2=other[0], merge_method="add")
    masks = [
        graph.add("LoadImage", MODEL_COLUMN, y, f"Person {number}", (360, 330), image="example.png")[1]
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
    positive, negative = prompts(graph, clip, prompt, LONGCAT_NEGATIVE)
    audio = graph.add("LoadAudio", PROMPT_COLUMN, 540, "Speech", (430, 140), audio="speech.wav")
    heard = graph.add("SPLongCatAvatarAudio", PROMPT_COLUMN, 730, None, (430, 60), audio_encoder=encoder, audio=audio[0])
    piece = {"positive": positive[0], "negative": negative[0], "vae": vae, "audio_1": heard[0], "image": image, "model": model}
    return audio[0], encoder, piece


def _avatar_video(graph: Graph, piece: dict[str, Wire], audio: Wire) -> None:
    """Two pieces, the second behind the first, and the video of both."""
    patch = patch_node(graph, piece.pop("model"), PATCH_COLUMN, 40)
    cached = graph.add("SPLongCatKVCache", PATCH_COLUMN, 270, None, (290, 60), model=patch[0], device="gpu")
    graph.group("Sequence parallel", PATCH_COLUMN - 20, -40, 330, 390)
    sampler = graph.add("KSamplerSelect", PATCH_COLUMN, 400, None, (290, 60), sampler_name="euler")
    sigmas = graph.add("SPLongCatSigmas", PATCH_COLUMN, 510, None, (290, 140), schedule="avatar_distill", steps=8, shift=7.0)
    how = {"sampler": sampler[0], "sigmas": sigmas[0]}
    first = _avatar_piece(graph, 40, cached[0], piece, how, 42)
    second = _avatar_piece(graph, 1020, cached[0], {**piece, "previous_frames": first}, how, 43)
    new = graph.add("ImageFromBatch", OUTPUT_COLUMN, 1020, "Cut off what repeats", (270, 90), image=second, batch_index=13, length=4096)
    joined = graph.add("ImageBatch", OUTPUT_COLUMN, 1160, "All frames so far", (270, 60), image1=first, image2=new[0])
    saved_video(graph, joined[0], 25, "video/longcat_avatar", 150, audio)


def _avatar_models(graph: Graph) -> tuple[Wire, Wire, Wire, Wire, Wire]:
    """Model with LoRA, text encoder, VAE, audio encoder, picture."""
    unet = graph.add("UNETLoader", MODEL_COLUMN, 40, None, (360, 90), unet_name="LongCat-Avatar-15_bf16.safetensors")
    lora = {"lora_name": "LongCat-Avatar-15_dmd_distill_lora_rank128_bf16.safetensors", "strength_model": 1.0}
    lora = graph.add("LoraLoaderModelOnly", MODEL_COLUMN, 180, None, (360, 90), model=unet[0], **lora)
    clip = graph.add("CLIPLoader", MODEL_COLUMN, 320, None, (360, 110), clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan")
    vae = graph.add("VAELoader", MODEL_COLUMN, 480, None, (360, 60), vae_name="wan_2.1_vae.safetensors")
    sound = graph.add("AudioEncoderLoader", MODEL_COLUMN, 590, None, (360, 60), audio_encoder_name="whisper_large_v3_fp16.safetensors")
    graph.group("Models", MODEL_COLUMN - 20, -40, 400, 710)
    image = graph.add("LoadImage", MODEL_COLUMN, 720, "First frame", (360, 330), image="example.png")
    return lora[0], clip[0], vae[0], sound[0], image[0]


def _avatar_piece(graph: Graph, y: int, model: Wire, piece: dict[str, Wire], how: dict[str, Wire], seed: int) -> Wire:
    """One piece of a video in the sampling column: its frames."""
    made = graph.add("SPLongCatAvatar", SAMPLE_COLUMN, y, None, (340, 330), **piece, width=832, height=480, length=93)
    guidance = {"cond1": made[0], "cond2": made[1], "negative": made[2], "cfg_conds": 1.0, "cfg_cond2_negative": 1.0, "style": "regular"}
    guider = graph.add("DualCFGGuider", SAMPLE_COLUMN, y + 380, None, (340, 160), model=model, **guidance)
    noise = graph.add("RandomNoise", SAMPLE_COLUMN, y + 590, None, (340, 90), noise_seed=seed)
    given = {**how, "noise": noise[0], "guider": guider[0], "latent_image": made[3]}
    sampled = graph.add("SamplerCustomAdvanced", SAMPLE_COLUMN, y + 730, None, (340, 120), **given)
    images = graph.add("VAEDecode", SAMPLE_COLUMN, y + 890, None, (340, 60), samples=sampled[0], vae=piece["vae"])
    return images[0]
