"""LongCat Avatar Audio: speech as LongCat-Video-Avatar hears it."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.models.longcat import audio as longcat_audio


class SPLongCatAvatarAudio(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatAvatarAudio",
            display_name="LongCat Avatar Audio",
            category="advanced/multi-gpu/LongCat-Video",
            description=(
                "Encodes speech of any length for LongCat-Video-Avatar, at the loudness that it was trained with. "
                "ComfyUI's own Audio Encoder Encode hears the first 30 seconds only, and cannot serve Avatar 1.0."
            ),
            search_aliases=["longcat audio", "avatar speech", "whisper encode"],
            inputs=[
                io.AudioEncoder.Input("audio_encoder", tooltip="Whisper large v3 for Avatar 1.5, chinese-wav2vec2-base for 1.0."),
                io.Audio.Input("audio", tooltip="The voice of one person, without music or noise."),
            ],
            outputs=[io.AudioEncoderOutput.Output(tooltip="For LongCat Avatar Conditioning.")],
        )

    @classmethod
    def execute(cls, audio_encoder, audio) -> io.NodeOutput:
        return io.NodeOutput(longcat_audio.encode(audio_encoder, audio["waveform"], audio["sample_rate"]))
