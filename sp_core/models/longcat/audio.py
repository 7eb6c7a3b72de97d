"""Sound as LongCat-Video-Avatar hears it: features of the host's audio encoders at the rate of the video. Plain torch.

Avatar 1.0 hears the twelve layers of chinese-wav2vec2-base, 32 times a second, at 16 frames a
second. Avatar 1.5 hears five groups of layers of Whisper large v3 at 25 frames a second.

Shape legend: n moments (of the encoder, or features), L layers, G groups of layers, C channels,
W features around a frame, f frames of the video. Source: LongCat-Video-Avatar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ...errors import SPError

RATE = 16000
#: key of the host's AUDIO_ENCODER_OUTPUT under which features that are ready lie, as a dict of :class:`Features`'s fields
FEATURES = "longcat"
#: loudness that the models were trained with, LUFS; what is more silent than this is left alone
LOUDNESS, SILENCE = -23.0, -100.0
#: seconds that Whisper takes at once, and its moments a second
CHUNK_SECONDS, WHISPER_RATE = 30, 50
#: frames a second of Avatar 1.5, each a feature; frames and features a second of Avatar 1.0
WHISPER_FPS, WAV2VEC_FPS, WAV2VEC_RATE = 25, 16, 32
#: Whisper's levels (what goes into each of 32 layers, and the output) by groups
_GROUPS = (range(8), range(8, 16), range(16, 24), range(24, 32), range(32, 33))
#: features on each side of a frame
_AROUND = 2
_LOW_PASS_HZ, _LOW_PASS_ORDER = 3000, 3


@dataclass(frozen=True)
class Features:
    """Features of one voice, and how many of them a frame of the video goes on."""

    values_nGC: Tensor
    stride: int


def windows(features: Features, first_frame: int, frames: int) -> Tensor:
    """(f, W, G, C): the features around each frame. Before the first and after the last one these are repeated."""
    centre = features.stride * torch.arange(first_frame, first_frame + frames)
    index = centre[:, None] + torch.arange(-_AROUND, _AROUND + 1)
    return features.values_nGC[index.clamp(0, features.values_nGC.size(0) - 1)]


def whisper_features(levels_nLC: Tensor, frames: int) -> Tensor:
    """Means of Whisper's levels by groups, stretched over ``frames`` frames: (frames, 5, C).

    Args:
        levels_nLC: all 33 levels; moments behind the sound's end are not looked at.
    """
    means = torch.stack([levels_nLC[:, group.start : group.stop].mean(1) for group in _GROUPS], 1)
    return _stretched(means[: WHISPER_RATE // WHISPER_FPS * frames], frames)


def _stretched(x_nGC: Tensor, count: int) -> Tensor:
    """(count, G, C): moments between the first and the last one, at equal distances."""
    x = nnf.interpolate(x_nGC.flatten(1).T[None], size=count, mode="linear", align_corners=True)
    return x[0].T.unflatten(1, x_nGC.shape[1:])


def with_loudness(wave_n: Tensor) -> Tensor:
    """The wave at the loudness that the models know; silence stays silent. At least 0.4 s, or it is left alone."""
    import torchaudio

    if wave_n.numel() < 0.4 * RATE or not wave_n.any():
        return wave_n
    loudness = float(torchaudio.functional.loudness(wave_n[None], RATE))
    return wave_n * 10 ** ((LOUDNESS - loudness) / 20) if loudness > SILENCE else wave_n


def low_passed(wave_n: Tensor) -> Tensor:
    """What is above 3 kHz taken away, as Avatar 1.0 was trained; the noise that it was trained with is left out."""
    import torchaudio
    from scipy.signal import butter

    b, a = butter(_LOW_PASS_ORDER, _LOW_PASS_HZ / (RATE / 2), btype="low")
    denominator, numerator = (torch.tensor(x, dtype=torch.float64) for x in (a, b))
    return torchaudio.functional.lfilter(wave_n.double(), denominator, numerator, clamp=False).to(wave_n.dtype)


def encode(encoder: Any, waveform: Tensor, sample_rate: int) -> dict[str, Any]:
    """The host's AUDIO_ENCODER_OUTPUT of sound of any length, with the features that an Avatar model takes.

    Args:
        encoder: the host's audio encoder, Whisper large v3 or wav2vec2-base.
        waveform: (1, channels, samples).

    Raises:
        SPError: it is another encoder.
    """
    import torchaudio

    wave = torchaudio.functional.resample(waveform[0].float().mean(0), sample_rate, RATE)
    kind, layers = type(encoder.model).__name__, len(encoder.model.encoder.layers)
    if kind == "WhisperLargeV3":
        return _encode_whisper(encoder, with_loudness(wave))
    if kind == "Wav2Vec2Model" and layers == 12:
        return _encode_wav2vec(encoder, low_passed(with_loudness(wave)))
    raise SPError(
        f"LongCat Avatar takes Whisper large v3 (Avatar 1.5) or chinese-wav2vec2-base (1.0), this audio encoder is {kind} with {layers} "
        "layers: load one of these two with Load Audio Encoder"
    )


def _encode_whisper(encoder: Any, wave_n: Tensor) -> dict[str, Any]:
    """By pieces of 30 seconds, each of which Whisper hears by itself."""
    pieces = [encoder.encode_audio(piece[None, None], RATE) for piece in wave_n.split(CHUNK_SECONDS * RATE)]
    levels = tuple(torch.cat(level, 1) for level in zip(*[piece["encoded_audio_all_layers"] for piece in pieces], strict=True))
    return {"encoded_audio": levels[-1], "encoded_audio_all_layers": levels, "audio_samples": wave_n.numel()}


def _encode_wav2vec(encoder: Any, wave_n: Tensor) -> dict[str, Any]:
    """The sound's features are stretched to 32 a second in front of the transformer, so the host's own forward will not do."""
    import comfy.model_management

    comfy.model_management.load_model_gpu(encoder.patcher)
    model = encoder.model
    wave = wave_n.to(encoder.load_device)
    wave = (wave - wave.mean()) / torch.sqrt(wave.var(correction=0) + 1e-7)
    heard = model.feature_extractor(wave[None])
    count = int(wave_n.numel() / RATE * WAV2VEC_RATE)
    heard = nnf.interpolate(heard.transpose(1, 2), size=count, mode="linear", align_corners=True).transpose(1, 2)
    _, levels = model.encoder(model.feature_projection(heard))
    features = torch.stack([level[0] for level in levels[1:]], 1).float().cpu()
    return {
        "encoded_audio": levels[-1],
        "encoded_audio_all_layers": levels,
        "audio_samples": wave_n.numel(),
        FEATURES: {"values_nGC": features, "stride": WAV2VEC_RATE // WAV2VEC_FPS},
    }


def features_of(output: dict[str, Any]) -> Features:
    """Features of an AUDIO_ENCODER_OUTPUT, of LongCat Avatar Audio or of the host's Whisper.

    Raises:
        SPError: another encoder made it.
    """
    if FEATURES in output:
        return Features(**output[FEATURES])
    levels: Sequence[Tensor] = output["encoded_audio_all_layers"]
    if len(levels) != _GROUPS[-1].stop:
        raise SPError(
            f"This audio was encoded into {len(levels)} levels, Whisper large v3 gives {_GROUPS[-1].stop}. Encode it with "
            "LongCat Avatar Audio: of the host's encoders it takes Whisper large v3 and chinese-wav2vec2-base"
        )
    seconds = min(output["audio_samples"] / RATE, levels[0].size(1) / WHISPER_RATE)
    frames = max(1, int(seconds * WHISPER_FPS))
    return Features(whisper_features(torch.stack([level[0] for level in levels], 1).float().cpu(), frames), 1)
