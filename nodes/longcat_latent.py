"""LongCat Latent: an empty video, or one that starts with given frames."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.models.longcat import patches


class SPLongCatLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatLatent",
            display_name="LongCat Latent",
            category="advanced/multi-gpu/LongCat-Video",
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
