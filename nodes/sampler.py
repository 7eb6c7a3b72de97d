"""SP Sampler: KSampler on all devices, with a report."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.host.ui.patch_node import check_degrees
from sp_core.host.ui.sampler_node import sample, sampler_choices
from sp_core.planner.degrees import WEIGHT_CHOICES, RequestedDegrees


class SPSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        samplers, schedulers = sampler_choices()
        return io.Schema(
            node_id="SPSampler",
            display_name="SP Sampler",
            category="advanced/multi-gpu",
            description=(
                "KSampler that runs the model on several devices at once. It patches the model if SP Model Patch has not done "
                "so yet, and reports how the work was split and what it cost."
            ),
            search_aliases=["multi gpu sampler", "sequence parallel", "ksampler"],
            inputs=[
                io.Model.Input("model", tooltip="A diffusion model, patched by SP Model Patch or not."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The random seed used for creating the noise. The noise is drawn once, so the device count does not change it.",
                ),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Number of denoising steps."),
                io.Float.Input(
                    "cfg",
                    default=6.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Classifier-free guidance. At 1.0 the negative prompt is not computed, which halves the work.",
                ),
                io.Combo.Input("sampler_name", options=samplers, tooltip="The algorithm used when sampling."),
                io.Combo.Input("scheduler", options=schedulers, tooltip="How noise is removed over the steps."),
                io.Conditioning.Input("positive", tooltip="What the video should show."),
                io.Conditioning.Input("negative", tooltip="What the video should not show."),
                io.Latent.Input("latent_image", tooltip="The latent to denoise."),
                io.Float.Input(
                    "denoise", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="How much is denoised; lower keeps the start's structure."
                ),
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="auto: all accelerators that ComfyUI sees. 0,1,3: these. cpu:4: four CPU workers (for tests). "
                    "Not used when SP Model Patch has patched the model already.",
                ),
                io.String.Input(
                    "shares",
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="How much of the work each device gets. auto: by measured speed where devices differ. equal: the same. "
                    "3,1: three times as much on the first of two devices. Not used when SP Model Patch has patched the model already.",
                ),
                io.Combo.Input(
                    "weights",
                    options=list(WEIGHT_CHOICES),
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="How the weights lie on the devices. whole: all of them on each. shared: each device holds its part. "
                    "auto: whole, but shared where whole does not fit on GPUs and gathering is predicted to be faster than main memory. "
                    "Not used when SP Model Patch has patched the model already.",
                ),
            ],
            outputs=[
                io.Latent.Output(tooltip="The denoised latent."),
                io.String.Output(
                    "report", tooltip="How the work was split, transport, seconds a forward, share of the exchange, bytes sent."
                ),
            ],
            hidden=[io.Hidden.dynprompt, io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, devices: str | None, shares: str | None = "auto") -> bool | str:
        # ComfyUI gives None for what comes over a wire; execute sees it and checks again.
        return check_degrees(devices, RequestedDegrees(shares=shares or "auto"))

    @classmethod
    def execute(
        cls,
        model,
        seed,
        steps,
        cfg,
        sampler_name,
        scheduler,
        positive,
        negative,
        latent_image,
        denoise,
        devices,
        shares="auto",
        weights="auto",
    ) -> io.NodeOutput:
        latent, report = sample(
            model,
            devices,
            cls.hidden.dynprompt,
            cls.hidden.unique_id,
            {
                "seed": seed,
                "steps": steps,
                "cfg": cfg,
                "sampler_name": sampler_name,
                "scheduler": scheduler,
                "positive": positive,
                "negative": negative,
                "latent": latent_image,
                "denoise": denoise,
            },
            RequestedDegrees(shares=shares, weights=weights),
        )
        return io.NodeOutput(latent, report)
