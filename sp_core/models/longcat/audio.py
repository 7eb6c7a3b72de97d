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
#: silence behind the sound that wav2vec2 hears, as much as one piece of a video may go on behind it
_SILENT_SECONDS = 6
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
    #: the same voice heard with silence behind it; None where nobody knows what is behind it
    padded_nGC: Tensor | None = None
    #: how many of the last ones of these are silence that may be repeated
    period: int = 1


def windows(features: Features, first_frame: int, frames: int) -> Tensor:
    """(f, W, G, C): the features around each frame. Before the first and after the last one these are repeated.

    Frames behind the sound's end hear silence.

    Raises:
        SPError: nobody knows what is behind the sound's end, and the video goes on there.
    """
    centre = features.stride * torch.arange(first_frame, first_frame + frames)
    index = (centre[:, None] + torch.arange(-_AROUND, _AROUND + 1)).clamp_min(0)
    count = features.values_nGC.size(0)
    if centre[-1] < count:
        return features.values_nGC[index.clamp_max(count - 1)]
    if features.padded_nGC is None:
        raise SPError(
            f"The speech is known for {-(-count // features.stride)} frames of the video, and this piece ends with frame "
            f"{first_frame + frames}. Encode it with LongCat Avatar Audio, which hears sound of any length and the silence behind it"
        )
    # the sound is taken to go on in silence to the end of this piece
    index = index.clamp_max(features.stride * (first_frame + frames) - 1)
    known, period = features.padded_nGC.size(0), features.period
    return features.padded_nGC[torch.where(index < known, index, known - period + (index - known) % period)]


def whisper_features(levels_nLC: Tensor, frames: int) -> Tensor:
    """Means of Whisper's levels by groups, stretched over ``frames`` frames: (frames, 5, C).

    Args:
        levels_nLC: all 33 levels; moments behind the sound's end are not looked at.
    """
    return _stretched(_means(levels_nLC)[: WHISPER_RATE // WHISPER_FPS * frames], frames)


def _means(levels_nLC: Tensor) -> Tensor:
    """(n, 5, C)"""
    return torch.stack([levels_nLC[:, group.start : group.stop].mean(1) for group in _GROUPS], 1)


def _of_whisper(levels_nLC: Tensor, samples: int, silent_nLC: Tensor | None = None) -> Features:
    """Features of a sound of so many samples; ``silent_nLC`` are levels of a piece of silence."""
    seconds = min(samples / RATE, levels_nLC.size(0) / WHISPER_RATE)
    frames = max(1, int(seconds * WHISPER_FPS))
    values, step = whisper_features(levels_nLC, frames), WHISPER_RATE // WHISPER_FPS
    # the last frame lies on the last moment of the sound; from there on a frame is two moments
    behind = _means(levels_nLC[step * (frames + 1) - 1 :: step])
    if silent_nLC is not None:
        behind = torch.cat([behind, _means(silent_nLC[step - 1 :: step])])
    padded = torch.cat([values, behind]) if behind.size(0) else None
    return Features(values, 1, padded, 1 if silent_nLC is None else silent_nLC.size(0) // step)


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
        return _encode_wav2vec(encoder, wave)
    raise SPError(
        f"LongCat Avatar takes Whisper large v3 (Avatar 1.5) or chinese-wav2vec2-base (1.0), this audio encoder is {kind} with {layers} "
        "layers: load one of these two with Load Audio Encoder"
    )


def _encode_whisper(encoder: Any, wave_n: Tensor) -> dict[str, Any]:
    """By pieces of 30 seconds, each of which Whisper hears by itself, silence up to its end included."""
    pieces = [encoder.encode_audio(piece[None, None], RATE)["encoded_audio_all_layers"] for piece in wave_n.split(CHUNK_SECONDS * RATE)]
    levels = tuple(torch.cat(level, 1) for level in zip(*pieces, strict=True))
    silent = encoder.encode_audio(torch.zeros(1, 1, RATE), RATE)["encoded_audio_all_layers"]
    features = _of_whisper(_joined(levels), wave_n.numel(), _joined(silent))
    return {"encoded_audio": levels[-1], "encoded_audio_all_layers": levels, "audio_samples": wave_n.numel(), FEATURES: vars(features)}


def _joined(levels: Sequence[Tensor]) -> Tensor:
    """(1, n, C) of each level -> fp32 (n, L, C)."""
    return torch.stack([level[0] for level in levels], 1).float().cpu()


def _encode_wav2vec(encoder: Any, wave_n: Tensor) -> dict[str, Any]:
    """What wav2vec2 hears depends on the whole sound: it hears it once as it is, and once with silence behind it."""
    levels = _wav2vec_levels(encoder, low_passed(with_loudness(wave_n)))
    longer = torch.cat([wave_n, wave_n.new_zeros(_SILENT_SECONDS * RATE)])
    padded = _wav2vec_levels(encoder, low_passed(with_loudness(longer)))
    features = Features(_joined(levels[1:]), WAV2VEC_RATE // WAV2VEC_FPS, _joined(padded[1:]))
    return {"encoded_audio": levels[-1], "encoded_audio_all_layers": levels, "audio_samples": wave_n.numel(), FEATURES: vars(features)}


def _wav2vec_levels(encoder: Any, wave_n: Tensor) -> Sequence[Tensor]:
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
    return levels  # type: ignore[no-any-return]


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
    return _of_whisper(_joined(levels), output["audio_samples"])
