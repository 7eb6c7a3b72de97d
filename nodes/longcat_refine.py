"""LongCat Refine Latent: a small video as the start of a large one."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.models.longcat import patches


class SPLongCatRefineLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatRefineLatent",
            display_name="LongCat Refine Latent",
            category="advanced/multi-gpu/LongCat-Video",
            description=(
                "Enlarges a video and encodes it, for the second pass with LongCat-Video's refinement LoRA, the refine schedule of "
                "LongCat Sigmas, and LongCat Block-Sparse Attention."
            ),
            search_aliases=["longcat refine", "longcat upscale", "longcat 720p"],
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE of Wan 2.1."),
                io.Image.Input("video", tooltip="The small video, 480p at 15 frames a second."),
                io.Int.Input("width", default=1280, min=16, max=8192, step=16, tooltip="Width of the large video in pixels."),
                io.Int.Input("height", default=768, min=16, max=8192, step=16, tooltip="Height of the large video in pixels."),
                io.Boolean.Input(
                    "double_frames",
                    default=True,
                    tooltip="Put a frame between any two: 30 frames a second from 15. LongCat does both at once.",
                ),
                io.Image.Input(
                    "start",
                    optional=True,
                    tooltip="What the small video was made from, the input video of LongCat Latent: kept as first frames, in full size.",
                ),
                io.Int.Input(
                    "conditioning_frames",
                    default=13,
                    min=1,
                    max=8192,
                    step=4,
                    optional=True,
                    tooltip="How many of start's last frames the small video begins with, as in LongCat Latent.",
                ),
            ],
            outputs=[io.Latent.Output(tooltip="The enlarged video; with a noise mask where start is given.")],
        )

    @classmethod
    def execute(cls, vae, video, width, height, double_frames, start=None, conditioning_frames=13) -> io.NodeOutput:
        return io.NodeOutput(patches.refine_latent(vae, video, width, height, double_frames, start, conditioning_frames))
