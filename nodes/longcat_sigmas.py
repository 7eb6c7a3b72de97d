"""LongCat Sigmas: LongCat-Video's own noise schedules."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.models.longcat import schedules


class SPLongCatSigmas(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatSigmas",
            display_name="LongCat Sigmas",
            category="advanced/multi-gpu/LongCat-Video",
            description="LongCat-Video's own noise schedules, for SamplerCustom and SamplerCustomAdvanced with the euler sampler.",
            search_aliases=["longcat scheduler", "longcat steps"],
            inputs=[
                io.Combo.Input(
                    "schedule",
                    options=list(schedules.SCHEDULES),
                    default="base",
                    tooltip="base: text- and image-to-video, 50 steps. distill: with the distillation LoRA, 16 steps at cfg 1. "
                    "avatar_distill: Avatar 1.5 with its distillation LoRA, 8 steps at shift 7. "
                    "enhance_hf: continuation; fine detail gets ten more steps. refine: second pass over an upscaled video.",
                ),
                io.Int.Input(
                    "steps",
                    default=50,
                    min=2,
                    max=1000,
                    tooltip="Steps of the full schedule; use 16 with distill, 8 with avatar_distill. "
                    "enhance_hf and refine replace or keep only a part of these.",
                ),
                io.Float.Input(
                    "shift",
                    default=12.0,
                    min=0.1,
                    max=100.0,
                    step=0.1,
                    tooltip="12, for Avatar 1.5: 7. Higher spends more steps on noisy pictures.",
                ),
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
