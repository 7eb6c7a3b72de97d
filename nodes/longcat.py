"""LongCat-Video's nodes: schedules, latents with conditioning frames, guidance, the key/value cache."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.models.longcat import patches, schedules

_CATEGORY = "advanced/multi-gpu/LongCat-Video"


class SPLongCatSigmas(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatSigmas",
            display_name="LongCat Sigmas",
            category=_CATEGORY,
            description="LongCat-Video's own noise schedules, for SamplerCustom and SamplerCustomAdvanced with the euler sampler.",
            search_aliases=["longcat scheduler", "longcat steps"],
            inputs=[
                io.Combo.Input(
                    "schedule",
                    options=list(schedules.SCHEDULES),
                    default="base",
                    tooltip="base: text- and image-to-video, 50 steps. distill: with the distillation LoRA, 16 steps at cfg 1. "
                    "enhance_hf: continuation; fine detail gets ten more steps. refine: second pass over an upscaled video.",
                ),
                io.Int.Input(
                    "steps",
                    default=50,
                    min=2,
                    max=1000,
                    tooltip="Steps of the full schedule; use 16 with distill. enhance_hf and refine replace or keep only a part of these.",
                ),
                io.Float.Input("shift", default=12.0, min=0.1, max=100.0, step=0.1, tooltip="Higher spends more steps on noisy pictures."),
                io.Float.Input(
                    "refine_start",
                    default=0.5,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip="refine only: how much noise the upscaled video gets before it is refined.",
                ),
            ],
            outputs=[io.Sigmas.Output(tooltip="From the first step's noise to zero.")],
        )

    @classmethod
    def execute(cls, schedule: str, steps: int, shift: float, refine_start: float) -> io.NodeOutput:
        extra = {"start": refine_start} if schedule == "refine" else {}
        return io.NodeOutput(schedules.SCHEDULES[schedule](steps, shift, **extra))


class SPLongCatLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatLatent",
            display_name="LongCat Latent",
            category=_CATEGORY,
            description=(
                "The latent for LongCat-Video: empty for text-to-video, with a picture as its first frame for image-to-video, "
                "or starting with the last frames of a video that shall go on."
            ),
            search_aliases=["longcat image to video", "longcat continuation", "longcat i2v"],
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE of Wan 2.1."),
                io.Int.Input("width", default=832, min=16, max=8192, step=16, tooltip="Width of the video in pixels."),
                io.Int.Input("height", default=480, min=16, max=8192, step=16, tooltip="Height of the video in pixels."),
                io.Int.Input("length", default=93, min=1, max=8192, step=4, tooltip="Frames of the video, conditioning frames among them."),
                io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="How many videos to make at once."),
                io.Image.Input("video", optional=True, tooltip="A picture to start from, or a video to go on with."),
                io.Int.Input(
                    "conditioning_frames",
                    default=13,
                    min=1,
                    max=8192,
                    step=4,
                    optional=True,
                    tooltip="How many of the video's last frames are kept as the start of the new one.",
                ),
            ],
            outputs=[io.Latent.Output(tooltip="With a noise mask that keeps the conditioning frames.")],
        )

    @classmethod
    def execute(cls, vae, width, height, length, batch_size, video=None, conditioning_frames=13) -> io.NodeOutput:
        return io.NodeOutput(patches.make_latent(vae, width, height, length, batch_size, video, conditioning_frames))


class SPLongCatCFGZero(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatCFGZero",
            display_name="LongCat CFG-Zero",
            category=_CATEGORY,
            description="LongCat-Video's guidance: the negative prediction is scaled to fit. Not what CFGZeroStar does.",
            search_aliases=["longcat guidance", "cfg zero star"],
            inputs=[io.Model.Input("model", tooltip="A LongCat-Video model, before or behind SP Model Patch.")],
            outputs=[io.Model.Output(tooltip="The model with this guidance.")],
        )

    @classmethod
    def execute(cls, model) -> io.NodeOutput:
        return io.NodeOutput(patches.with_cfg_zero(model))


class SPLongCatKVCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatKVCache",
            display_name="LongCat KV Cache",
            category=_CATEGORY,
            description=(
                "Computes the conditioning frames once instead of in every step, with the same result. "
                "For 13 frames at 480 x 832 it takes 4.6 GB, shared by all devices."
            ),
            search_aliases=["longcat cache", "kv cache"],
            inputs=[
                io.Model.Input("model", tooltip="A LongCat-Video model, before or behind SP Model Patch."),
                io.Combo.Input(
                    "device",
                    options=["gpu", "cpu"],
                    default="gpu",
                    tooltip="gpu: keep the cache where it is used. cpu: in main memory, copied for every block.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model with the cache.")],
        )

    @classmethod
    def execute(cls, model, device: str) -> io.NodeOutput:
        return io.NodeOutput(patches.with_kv_cache(model, device))


NODES: list[type[io.ComfyNode]] = [SPLongCatSigmas, SPLongCatLatent, SPLongCatCFGZero, SPLongCatKVCache]
