"""Sound for LongCat-Video-Avatar without ComfyUI: loudness, filter, Whisper's levels, windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sp_core.errors import SPError
from sp_core.models.longcat.audio import Features, features_of, low_passed, whisper_features, windows, with_loudness

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
WINDOWS = json.loads((FIXTURES / "longcat_avatar_vectors.json").read_text())["audio_windows"]


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    return load_file(FIXTURES / "longcat_avatar_audio.safetensors")


def test_loudness(data: dict[str, Tensor]) -> None:
    """Torchaudio's meter and the reference's read 0.04 LU apart on this wave: half a percent of the gain."""
    torch.testing.assert_close(with_loudness(data["in.wave"]), data["out.wave_loudness"], atol=1e-3, rtol=6e-3)
    silence = torch.zeros(16000)
    assert torch.equal(with_loudness(silence), silence)


def test_low_pass(data: dict[str, Tensor]) -> None:
    torch.testing.assert_close(low_passed(data["out.wave_loudness"]), data["out.wave_lowpass"], atol=1e-5, rtol=0)


def test_levels_by_groups(data: dict[str, Tensor]) -> None:
    out = whisper_features(data["in.whisper_hidden"][0], 54)
    torch.testing.assert_close(out, data["out.whisper_features"], atol=1e-5, rtol=0)
    levels = tuple(data["in.whisper_hidden"].unbind(2))
    output = {"encoded_audio_all_layers": levels, "audio_samples": 54 * 640}
    torch.testing.assert_close(features_of(output).values_nGC, out)


@pytest.mark.parametrize("vector", WINDOWS, ids=lambda vector: f"{vector['start']} by {vector['stride']}")
def test_windows(vector: dict[str, Any]) -> None:
    features = Features(torch.arange(vector["features"]).float().view(-1, 1, 1), vector["stride"])
    found = windows(features, vector["start"] // vector["stride"], vector["frames"])
    assert found[..., 0, 0].tolist() == vector["index"]


def test_other_encoders_are_refused() -> None:
    with pytest.raises(SPError, match="encoded into 13 levels, Whisper large v3 gives 33"):
        features_of({"encoded_audio_all_layers": tuple(torch.zeros(1, 5, 8) for _ in range(13)), "audio_samples": 16000})
