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
    values = torch.arange(vector["features"]).float().view(-1, 1, 1)
    features = Features(values, vector["stride"], padded_nGC=values)
    found = windows(features, vector["start"] // vector["stride"], vector["frames"])
    assert found[..., 0, 0].tolist() == vector["index"]


def test_other_encoders_are_refused() -> None:
    with pytest.raises(SPError, match="encoded into 13 levels, Whisper large v3 gives 33"):
        features_of({"encoded_audio_all_layers": tuple(torch.zeros(1, 5, 8) for _ in range(13)), "audio_samples": 16000})


def counting(first: int, last: int) -> Tensor:
    return torch.arange(first, last + 1).float().view(-1, 1, 1)


@pytest.mark.parametrize(
    ("piece", "centres"),
    [
        ((0, 5), [0, 1, 2, 3, 4]),
        # a piece beyond the sound's 10 features reads what was heard with silence behind it: 100 and on
        ((8, 5), [108, 109, 110, 111, 112]),
        # and from its end on the last three, which are silence, again and again
        ((14, 8), [114, 115, 113, 114, 115, 113, 114, 115]),
        ((101, 4), [113 + (3 + place - 13) % 3 for place in range(101, 105)]),
    ],
)
def test_behind_the_sound_is_silence(piece: tuple[int, int], centres: list[int]) -> None:
    features = Features(counting(0, 9), 1, counting(100, 115), 3)
    assert windows(features, *piece)[:, 2, 0, 0].tolist() == centres


def test_no_frame_hears_more_than_the_video_has() -> None:
    """The reference puts silence behind a sound up to the video's end, and repeats the last feature of that."""
    features = Features(counting(0, 9), 2, counting(0, 40))
    assert windows(features, 0, 9)[-1, :, 0, 0].tolist() == [14, 15, 16, 17, 17]


def test_what_nobody_knows_is_told() -> None:
    windows(Features(counting(0, 9), 2), 0, 5)
    with pytest.raises(SPError, match=r"known for 5 frames of the video, and this piece ends with frame 6.*LongCat Avatar Audio"):
        windows(Features(counting(0, 9), 2), 0, 6)


@pytest.mark.parametrize(("seconds", "known"), [(4, True), (29.9, True), (31, False)])
def test_sound_of_the_hosts_own_node_ends_in_silence_unless_it_was_cut(seconds: float, known: bool) -> None:
    levels = tuple(torch.arange(1500).float().view(1, -1, 1).expand(1, 1500, 2) for _ in range(33))
    features = features_of({"encoded_audio_all_layers": levels, "audio_samples": int(seconds * 16000)})
    assert (features.padded_nGC is not None) == known
    if features.padded_nGC is not None:
        frames = int(seconds * 25)
        assert torch.equal(features.padded_nGC[:frames], features.values_nGC) and features.padded_nGC.size(0) == 750
        assert features.padded_nGC[frames - 1 :, 0, 0].tolist() == pytest.approx(list(range(2 * frames - 1, 1500, 2)))
