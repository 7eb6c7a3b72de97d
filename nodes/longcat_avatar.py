"""LongCat Avatar Conditioning: one piece of a talking person's video."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.models.longcat import audio as longcat_audio
from sp_core.models.longcat import avatar_node


class SPLongCatAvatar(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatAvatar",
            display_name="LongCat Avatar Conditioning",
            category="advanced/multi-gpu/LongCat-Video",
            description=(
                "What LongCat-Video-Avatar needs for one piece of a video: speech, picture, who says what, and the video so far. "
                "The three conditionings go to Dual CFG Guider: prompt to cond1, negative to cond2, silent to negative."
            ),
            search_aliases=["longcat avatar", "talking head", "lip sync", "audio to video"],
            inputs=[
                io.Conditioning.Input("positive", tooltip="The prompt."),
                io.Conditioning.Input("negative", tooltip="The negative prompt."),
                io.Vae.Input("vae", tooltip="The VAE of Wan 2.1."),
                io.Int.Input("width", default=832, min=16, max=8192, step=16, tooltip="Width of the video in pixels."),
                io.Int.Input("height", default=480, min=16, max=8192, step=16, tooltip="Height of the video in pixels."),
                io.Int.Input("length", default=93, min=5, max=8192, step=4, tooltip="Frames of this piece, repeated ones among them."),
                io.AudioEncoderOutput.Input("audio_1", tooltip="Speech of the whole video, of LongCat Avatar Audio."),
                io.Image.Input("image", optional=True, tooltip="How the persons look: the video's first frame. Without it: prompt only."),
                io.AudioEncoderOutput.Input("audio_2", optional=True, tooltip="Speech of a second person, silent while others speak."),
                io.Mask.Input("mask_1", optional=True, tooltip="Where the first of several persons is in the picture."),
                io.Mask.Input("mask_2", optional=True, tooltip="Where the second person is."),
                io.AudioEncoderOutput.Input("audio_3", optional=True, advanced=True, tooltip="Silence for people who say nothing."),
                io.Mask.Input("mask_3", optional=True, advanced=True, tooltip="Where the people are who say nothing."),
                io.Image.Input(
                    "previous_frames", optional=True, tooltip="All frames that were made so far; the video goes on behind them."
                ),
                io.Latent.Input(
                    "previous_latent",
                    optional=True,
                    advanced=True,
                    tooltip="Avatar 1.0: the latent of the piece before, as it was sampled. Its end stands for the encoded frames.",
                ),
                io.Int.Input(
                    "conditioning_frames",
                    default=13,
                    min=1,
                    max=8192,
                    step=4,
                    optional=True,
                    tooltip="How many frames so far are repeated.",
                ),
                io.Int.Input(
                    "reference_frame",
                    default=10,
                    min=-8192,
                    max=8192,
                    optional=True,
                    advanced=True,
                    tooltip="Going on: the latent frame near which the picture counts most. Far away, poses vary more.",
                ),
                io.Int.Input(
                    "hidden_around",
                    default=3,
                    min=0,
                    max=8192,
                    optional=True,
                    advanced=True,
                    tooltip="Going on: latent frames as near to reference_frame as this do not see the picture, so that nobody freezes.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive", tooltip="The prompt, with the speech."),
                io.Conditioning.Output(display_name="negative", tooltip="The negative prompt, with the speech."),
                io.Conditioning.Output(display_name="silent", tooltip="The negative prompt, with silence."),
                io.Latent.Output(display_name="latent", tooltip="With a noise mask that keeps the frames that are given."),
                io.Int.Output(
                    display_name="repeated", tooltip="How many first frames repeat the video so far: cut them off behind the VAE."
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        positive,
        negative,
        vae,
        width,
        height,
        length,
        audio_1,
        image=None,
        previous_frames=None,
        previous_latent=None,
        conditioning_frames=13,
        reference_frame=10,
        hidden_around=3,
        **persons,
    ) -> io.NodeOutput:
        voices = [
            longcat_audio.features_of(audio) for audio in (audio_1, persons.get("audio_2"), persons.get("audio_3")) if audio is not None
        ]
        masks = tuple(mask for name in ("mask_1", "mask_2", "mask_3") if (mask := persons.get(name)) is not None)
        piece = avatar_node.Piece(width, height, length, image, previous_frames, previous_latent, conditioning_frames)
        made = avatar_node.condition(
            positive, negative, vae, piece, voices, avatar_node.Persons(masks) if masks else None, (reference_frame, hidden_around)
        )
        return io.NodeOutput(*made)
