"""What the shipped workflows have in common: prompts, columns, and nodes that stand together."""

from __future__ import annotations

from .graph import Graph, Node, Wire

#: the negative prompt that the Wan release recommends
WAN_NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
#: in English, as LongCat-Video's own demos have it
LONGCAT_NEGATIVE = (
    "bright tones, overexposed, static, blurred details, subtitles, style, painting, still picture, gray overall, worst quality, "
    "low quality, JPEG artifacts, ugly, incomplete, extra fingers, poorly drawn hands, deformed limbs, cluttered background"
)
LTX_NEGATIVE = "blurry, low quality, still frame, watermark, overlay, titles, subtitles"
FOX = "A red fox trots through deep snow between pine trees, the camera follows at its side, morning light, powder snow flies up."
HARBOUR = (
    "A fishing boat leaves a small harbour at dawn. The engine chugs, gulls cry, waves slap against the hull. The camera stands on "
    "the pier and slowly turns after the boat as it passes the lighthouse."
)
SPEAKER = "A person looks into the camera and speaks calmly, the head moves a little, daylight, a plain background."
SPEAKERS = "Two people talk calmly in turn and look into the camera, their heads move a little, daylight, a plain background."
MODEL_COLUMN, PROMPT_COLUMN, PATCH_COLUMN, SAMPLE_COLUMN, OUTPUT_COLUMN = 0, 420, 900, 1240, 1640


def patch_node(graph: Graph, model: Wire, x: int, y: int, title: str | None = None) -> Node:
    return graph.add("SPModelPatch", x, y, title, (290, 180), model=model, devices="auto")


def vae_patch_node(graph: Graph, vae: Wire, x: int, y: int) -> Node:
    return graph.add("SPVAEPatch", x, y, None, (290, 80), vae=vae, devices="auto")


def prompts(graph: Graph, clip: Wire, positive: str, negative: str) -> tuple[Node, Node]:
    first = graph.add("CLIPTextEncode", PROMPT_COLUMN, 40, "Prompt", (430, 190), clip=clip, text=positive)
    second = graph.add("CLIPTextEncode", PROMPT_COLUMN, 280, "Negative prompt", (430, 190), clip=clip, text=negative)
    graph.group("Prompt", PROMPT_COLUMN - 20, -40, 470, 530)
    return first, second


def guided_sampling(graph: Graph, model: Wire, positive: Wire, negative: Wire, sigmas: Wire, latent: Wire, cfg: float = 4.0) -> Node:
    """Guider, noise, sampler and SamplerCustomAdvanced, in the sampling column."""
    guider = graph.add("CFGGuider", SAMPLE_COLUMN, 40, None, (340, 100), model=model, positive=positive, negative=negative, cfg=cfg)
    noise = graph.add("RandomNoise", SAMPLE_COLUMN, 190, None, (340, 90), noise_seed=42)
    sampler = graph.add("KSamplerSelect", SAMPLE_COLUMN, 330, None, (340, 60), sampler_name="euler")
    inputs = {"noise": noise[0], "guider": guider[0], "sampler": sampler[0], "sigmas": sigmas, "latent_image": latent}
    return graph.add("SamplerCustomAdvanced", SAMPLE_COLUMN, 440, None, (340, 120), **inputs)


def saved_video(graph: Graph, images: Wire, fps: float, prefix: str, y: int, audio: Wire | None = None) -> None:
    sound = {} if audio is None else {"audio": audio}
    video = graph.add("CreateVideo", OUTPUT_COLUMN, y, None, (270, 110), images=images, fps=fps, **sound)
    graph.add("SaveVideo", OUTPUT_COLUMN + 310, 40, None, (440, 420), video=video[0], filename_prefix=prefix)
