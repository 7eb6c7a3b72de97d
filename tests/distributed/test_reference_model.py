"""The whole chain without ComfyUI: launcher, control plane, hooks, exchange, gather, on the reference model."""

from __future__ import annotations

import pytest
import torch

from sp_core.pool.devices import parse_devices
from sp_core.reference import ReferenceConfig
from sp_core.reference.sample import Inputs, local, pooled, sample, step_arguments

CONFIG = ReferenceConfig()
STEPS = 3


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    inputs = Inputs.seeded(CONFIG, 1, frames=3, rows=10, columns=14)
    assert inputs.tokens == 105  # divides by 3, not by 2; 5 video and 3 audio heads divide by neither
    return inputs


@pytest.mark.parametrize("devices", ["cpu:2", "cpu:3"])
def test_workers_make_what_one_process_makes(devices: str, inputs: Inputs) -> None:
    alone = sample(local(CONFIG, 0), inputs, STEPS)
    with pooled(CONFIG, 0, parse_devices(devices, "cpu", 0)) as predict:
        together = sample(predict, inputs, STEPS)
    assert relative(together.video, alone.video) <= 2e-5
    assert relative(together.audio, alone.audio) <= 2e-5


def test_every_input_matters(inputs: Inputs) -> None:
    """Parity would say little about a model that ignores what it is given: far tokens, text, sound, timesteps."""
    predict = local(CONFIG, 0)
    arguments = step_arguments(inputs, inputs.video, inputs.audio, 0.5)
    video, audio = predict(arguments)
    far = arguments["video"].clone()
    far[:, :, -1, -1, -1] += 1
    changes = {
        "video": far,
        "audio": arguments["audio"] + 0.1,
        "text": arguments["text"] + 0.1,
        "video_timestep": arguments["video_timestep"] * 0.9,
    }
    for name, value in changes.items():
        changed_video, changed_audio = predict({**arguments, name: value})
        assert relative(changed_video[:, :, 0, 0, 0], video[:, :, 0, 0, 0]) > 1e-4, f"the first token of the video does not see {name}"
        assert relative(changed_audio, audio) > 1e-4, f"the sound does not see {name}"


def test_a_latent_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide into patches"):
        CONFIG.grid((1, 16, 3, 9, 14))
