"""A few denoising steps of the reference model, in this process or in a pool."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..pool.coordinator import Pool
from ..pool.devices import WorkerDevice
from ..pool.launcher import ServiceSpec
from .model import AudioVideoDiT, ReferenceConfig

#: (the arguments of AudioVideoDiT.forward by name) -> predictions of video and audio
Predict = Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]


@dataclass
class Inputs:
    """What one sampling run starts from. The first latent frame is nearly clean: its tokens have a timestep of their own."""

    video: Tensor
    audio: Tensor
    text: Tensor
    #: (B, T): 1 for tokens that are denoised, less for those that are mostly given
    strength: Tensor

    @classmethod
    def seeded(cls, config: ReferenceConfig, seed: int, frames: int, rows: int, columns: int, audio_tokens: int = 26) -> Inputs:
        """Noise for a latent of (frames, rows, columns)."""
        generator = torch.Generator().manual_seed(seed)
        video = torch.randn(1, config.video_channels, frames, rows, columns, generator=generator)
        grid = config.grid(video.shape)
        strength = torch.ones(1, prod(grid))
        strength[:, : grid[1] * grid[2]] = 0.1
        audio = torch.randn(1, audio_tokens, config.audio_channels, generator=generator)
        return cls(video, audio, torch.randn(1, 13, config.text_dim, generator=generator), strength)

    @property
    def tokens(self) -> int:
        return self.strength.size(1)


@dataclass
class Sampled:
    video: Tensor
    audio: Tensor
    seconds: list[float] = field(default_factory=list)


def step_arguments(inputs: Inputs, video: Tensor, audio: Tensor, sigma: float) -> dict[str, Tensor]:
    timestep = torch.full((1, 1), sigma)
    return {
        "video": video,
        "audio": audio,
        "video_timestep": timestep * inputs.strength,
        "audio_timestep": timestep,
        "text": inputs.text,
    }


@torch.inference_mode()
def sample(predict: Predict, inputs: Inputs, steps: int) -> Sampled:
    """Euler's method on a flow from noise (sigma 1) to data (sigma 0)."""
    sigmas = torch.linspace(1, 0, steps + 1).tolist()
    done = Sampled(inputs.video, inputs.audio)
    for sigma, following in itertools.pairwise(sigmas):
        started = time.perf_counter()
        video, audio = predict(step_arguments(inputs, done.video, done.audio, sigma))
        done.video = done.video + (following - sigma) * video
        done.audio = done.audio + (following - sigma) * audio
        done.seconds.append(time.perf_counter() - started)
    return done


def local(config: ReferenceConfig, seed: int, device: torch.device | str = "cpu") -> Predict:
    """The model in this process, on one device; results on the CPU."""
    model = AudioVideoDiT.seeded(config, seed).to(device)

    @torch.inference_mode()
    def predict(arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        video, audio = model(**{name: value.to(device) for name, value in arguments.items()})
        return video.cpu(), audio.cpu()

    return predict


@contextlib.contextmanager
def open_pool(config: ReferenceConfig, seed: int, devices: tuple[WorkerDevice, ...]) -> Iterator[Pool]:
    """Workers that hold the reference model, one a device."""
    pool = Pool(devices, ServiceSpec("sp_core.reference.service:ReferenceService", {"config": config.to_plain(), "seed": seed}))
    pool.start()
    try:
        yield pool
    finally:
        pool.shutdown()


def forward(pool: Pool, arguments: dict[str, Tensor]) -> dict[str, Any]:
    """The service's reply to one prediction: ``output`` and what it cost."""
    return pool.call("forward", arguments, volatile=("video", "audio"))  # type: ignore[no-any-return]


@contextlib.contextmanager
def pooled(config: ReferenceConfig, seed: int, devices: tuple[WorkerDevice, ...]) -> Iterator[Predict]:
    """The model in a pool of workers, as a function."""

    with open_pool(config, seed, devices) as pool:

        def predict(arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            video, audio = forward(pool, arguments)["output"]
            return video, audio

        yield predict
