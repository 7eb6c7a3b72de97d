"""SP Model Patch: MODEL in, MODEL out, computing on all devices."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.host.ui.patch_node import KEEP_LOADED, check_degrees, patch_model, supported_models
from sp_core.planner.degrees import LAYOUT_CHOICES, WEIGHT_CHOICES, RequestedDegrees


class SPModelPatch(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPModelPatch",
            display_name="SP Model Patch",
            category="advanced/multi-gpu",
            description=(
                "Runs the model on several devices at once: each works on a part of the video's "
                "tokens, or on some rows of a batch. The result is the one that a single device gives. Place it behind "
                "everything that changes the model (loaders, LoRAs, shifts, attention patches) and before the sampler or guider."
            ),
            search_aliases=["multi gpu", "sequence parallel", "ulysses", "multiple gpus"],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="Any diffusion model. Whole rows of a batch are shared out (positive and negative prompt, several latents), "
                    f"and of these models the tokens of one video or picture: {', '.join(supported_models())}.",
                ),
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="auto: all accelerators that ComfyUI sees. 0,1,3: these. cpu:4: four CPU workers (for tests). "
                    "With one device the model is returned unchanged.",
                ),
                io.Combo.Input(
                    "keep_loaded",
                    options=list(KEEP_LOADED),
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="When the workers' weights leave the devices. auto: when ComfyUI wants memory (VAE decode, another "
                    "model, the unload button). always: only on the unload button. never: after each sampling.",
                ),
                io.Combo.Input(
                    "layout",
                    options=list(LAYOUT_CHOICES),
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="How the video or picture is cut. flat: runs of tokens. tiles: rectangles of the frame, all frames on every "
                    "device. The result is the same.",
                ),
                io.Int.Input(
                    "cfg_split",
                    default=0,
                    min=0,
                    max=2,
                    optional=True,
                    advanced=True,
                    tooltip="2: half of the devices compute the positive prompt, half the negative. 1: all compute both. 0: automatic.",
                ),
                io.Int.Input(
                    "ring",
                    default=0,
                    min=0,
                    max=16,
                    optional=True,
                    advanced=True,
                    tooltip="Devices in a ring that passes keys and values on. 0: automatic.",
                ),
                io.Int.Input(
                    "ulysses",
                    default=0,
                    min=0,
                    max=16,
                    optional=True,
                    advanced=True,
                    tooltip="Devices that exchange token shards for head shards. 0: automatic. cfg_split x ring x ulysses = devices.",
                ),
                io.String.Input(
                    "shares",
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="How much of the work each device gets. auto: by measured speed where devices differ. equal: the same. "
                    "3,1: three times as much on the first of two devices. The result is the same.",
                ),
                io.Combo.Input(
                    "weights",
                    options=list(WEIGHT_CHOICES),
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="How the weights lie on the devices. whole: all of them on each. shared: each device holds its part, and a "
                    "block's weights are gathered before it computes, so N devices hold the model together. auto: whole, but shared where "
                    "whole does not fit on GPUs and gathering is predicted to be faster than main memory. The result is the same.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The same model; use it with any sampler or guider.")],
            hidden=[io.Hidden.dynprompt, io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls,
        devices: str | None,
        layout: str | None = "auto",
        cfg_split: int | None = 0,
        ring: int | None = 0,
        ulysses: int | None = 0,
        shares: str | None = "auto",
        weights: str | None = "auto",
    ) -> bool | str:
        # ComfyUI gives None for what comes over a wire; execute sees it and checks again.
        degrees = (cfg_split or 0, ring or 0, ulysses or 0)
        return check_degrees(devices, RequestedDegrees(*degrees, layout or "auto", shares or "auto", weights or "auto"))

    @classmethod
    def execute(
        cls,
        model,
        devices: str,
        keep_loaded: str = "auto",
        layout: str = "auto",
        cfg_split: int = 0,
        ring: int = 0,
        ulysses: int = 0,
        shares: str = "auto",
        weights: str = "auto",
    ) -> io.NodeOutput:
        requested = RequestedDegrees(cfg_split, ring, ulysses, layout, shares, weights)
        return io.NodeOutput(patch_model(model, devices, cls.hidden.dynprompt, cls.hidden.unique_id, keep_loaded, requested))
