"""LongCat Avatar Audio with the host's own encoder classes, made small: pieces of thirty seconds, and 32 features a second."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def host(comfyui_here: str) -> None:
    import comfy.model_patcher  # noqa: F401 (the host's audio encoders take for granted that somebody has imported it)


def randomised(encoder: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for parameter in encoder.model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return encoder


def test_whisper_hears_pieces_of_thirty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.audio_encoders.audio_encoders as encoders
    from comfy.audio_encoders.whisper import WhisperLargeV3

    from sp_core.models.longcat.audio import encode, features_of, windows

    monkeypatch.setattr(encoders, "WhisperLargeV3", partial(WhisperLargeV3, n_mels=16, n_audio_state=4, n_audio_head=2))
    encoder = randomised(encoders.AudioEncoderModel({"model_type": "whisper3"}))
    wave = torch.randn(1, 2, 16000 * 32, generator=torch.Generator().manual_seed(2)) / 20
    output = encode(encoder, wave, 16000)
    assert [level.shape for level in output["encoded_audio_all_layers"]] == [(1, 3000, 4)] * 33
    features = features_of(output)
    assert features.values_nGC.shape == (800, 5, 4) and features.stride == 1
    # behind the sound: what is left of its second piece, then thirty seconds of silence for as long as the video goes on
    silence = features_of(encoder.encode_audio(torch.zeros(1, 1, 16000 // 25), 16000)).padded_nGC
    assert features.padded_nGC is not None and features.padded_nGC.shape == (2250, 5, 4) and features.period == 750
    torch.testing.assert_close(windows(features, 1500 + 10, 9)[:, 2], silence[10:19])
    assert torch.equal(windows(features, 1500 + 10, 9), windows(features, 1500 + 7 * 750 + 10, 9))
    # the first piece is the same alone, but for its loudness
    alone = encoder.encode_audio(output_wave(wave)[None, None, : 16000 * 30], 16000)
    torch.testing.assert_close(output["encoded_audio_all_layers"][7][:, :1500], alone["encoded_audio_all_layers"][7])
    # and the host's own node gives the same where the sound is short and loud enough
    short = features_of(encoder.encode_audio(output_wave(wave)[None, None, : 16000 * 4], 16000))
    assert short.values_nGC.shape == (100, 5, 4)


def output_wave(wave: torch.Tensor) -> torch.Tensor:
    from sp_core.models.longcat.audio import with_loudness

    return with_loudness(wave[0].mean(0))


def test_wav2vec_hears_32_features_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.audio_encoders.audio_encoders as encoders

    from sp_core.models.longcat.audio import encode, features_of

    config = {"embed_dim": 32, "num_heads": 2, "num_layers": 12, "conv_norm": False, "conv_bias": False}
    config |= {"do_normalize": False, "do_stable_layer_norm": False}
    encoder = randomised(encoders.AudioEncoderModel({"model_type": "wav2vec2", **config}))
    wave = torch.randn(1, 1, 24000, generator=torch.Generator().manual_seed(2)) / 20
    features = features_of(encode(encoder, wave, 16000))
    assert features.values_nGC.shape == (48, 12, 32) and features.stride == 2
    assert features.values_nGC.isfinite().all()
    # a video that is longer hears the sound with silence behind it, as it is encoded with silence behind it
    longer = features_of(encode(encoder, torch.cat([wave, torch.zeros(1, 1, 6 * 16000)], 2), 16000))
    assert features.padded_nGC is not None
    torch.testing.assert_close(features.padded_nGC, longer.values_nGC)


def test_other_encoders_are_refused() -> None:
    import comfy.audio_encoders.audio_encoders as encoders

    from sp_core.errors import SPError
    from sp_core.models.longcat.audio import encode

    config = {"embed_dim": 32, "num_heads": 2, "num_layers": 24, "conv_norm": True, "conv_bias": True}
    encoder = encoders.AudioEncoderModel({"model_type": "wav2vec2", **config, "do_normalize": True, "do_stable_layer_norm": True})
    with pytest.raises(SPError, match="this audio encoder is Wav2Vec2Model with 24 layers"):
        encode(encoder, torch.randn(1, 1, 16000), 16000)
