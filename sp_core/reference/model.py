"""The reference model: two streams, video and audio, that see the text and each other.

What it has in common with LTX-2: per-token timesteps, 3-D RoPE, text cross-attention in
both streams, audio-to-video and video-to-audio cross-attention in each block.

Shape legend: B batch, T video tokens, A audio tokens, L text tokens, C channels;
F, H, W frames, rows and columns of the latent.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .layers import Attention, Modulation, Options, TimestepEmbedding, feed_forward, modulated, rope_3d


@dataclass(frozen=True)
class ReferenceConfig:
    """Sizes of a reference model. Heads need not be divisible by anything."""

    layers: int = 3
    heads: int = 5
    head_dim: int = 32
    audio_heads: int = 3
    audio_head_dim: int = 16
    text_dim: int = 48
    video_channels: int = 16
    audio_channels: int = 8
    #: frames, rows and columns of a token
    patch: tuple[int, int, int] = (1, 2, 2)

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def audio_dim(self) -> int:
        return self.audio_heads * self.audio_head_dim

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> ReferenceConfig:
        """From what JSON leaves of :meth:`to_plain`."""
        return cls(**{**values, "patch": tuple(values["patch"])})

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    def grid(self, latent_shape: torch.Size | tuple[int, ...]) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens of a latent (B, C, F, H, W).

        Raises:
            ValueError: the patch does not divide the latent.
        """
        sizes = tuple(latent_shape[2:])
        if len(sizes) != 3 or any(size % part for size, part in zip(sizes, self.patch, strict=True)):
            raise ValueError(f"a latent of {sizes} frames, rows and columns does not divide into patches of {self.patch}")
        f, h, w = (size // part for size, part in zip(sizes, self.patch, strict=True))
        return f, h, w


class Block(nn.Module):
    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        v, a, text = config.dim, config.audio_dim, config.text_dim
        self.video_self = Attention(v, v, v, config.heads)
        self.video_text = Attention(v, text, v, config.heads)
        self.audio_self = Attention(a, a, a, config.audio_heads)
        self.audio_text = Attention(a, text, a, config.audio_heads)
        self.audio_to_video = Attention(v, a, a, config.audio_heads)
        self.video_to_audio = Attention(a, v, a, config.audio_heads)
        self.video_mlp, self.audio_mlp = feed_forward(v), feed_forward(a)
        self.video_modulation, self.audio_modulation = Modulation(v, 6), Modulation(a, 6)

    def forward(
        self,
        video: Tensor,
        audio: Tensor,
        text: Tensor,
        video_time: Tensor,
        audio_time: Tensor,
        video_rope: Tensor,
        audio_rope: Tensor,
        transformer_options: Options | None = None,
    ) -> tuple[Tensor, Tensor]:
        """video (B, T, C), audio (B, A, C), text (B, L, C), times as their streams, RoPE angles (1, T, 1, D / 2)."""
        options = {"transformer_options": transformer_options}
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.video_modulation(video_time)
        audio_shift, audio_scale, audio_gate, *audio_mlp = self.audio_modulation(audio_time)

        video = video + gate * self.video_self(modulated(video, shift, scale), rope=video_rope, **options)
        audio = audio + audio_gate * self.audio_self(modulated(audio, audio_shift, audio_scale), rope=audio_rope, **options)
        video = video + self.video_text(video, text, **options)
        audio = audio + self.audio_text(audio, text, **options)

        seen, heard = modulated(video, shift, scale), modulated(audio, audio_shift, audio_scale)
        video = video + self.audio_to_video(seen, heard, **options)
        audio = audio + self.video_to_audio(heard, seen, **options)

        video = video + mlp_gate * self.video_mlp(modulated(video, mlp_shift, mlp_scale))
        audio = audio + audio_mlp[2] * self.audio_mlp(modulated(audio, audio_mlp[0], audio_mlp[1]))
        return video, audio


class Head(nn.Module):
    """To the channels of a token's patch."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.modulation, self.linear = Modulation(dim, 2), nn.Linear(dim, out)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.linear(modulated(x, *self.modulation(time)))  # type: ignore[no-any-return]


class AudioVideoDiT(nn.Module):
    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config
        patch = config.video_channels * prod(config.patch)
        self.video_in, self.audio_in = nn.Linear(patch, config.dim), nn.Linear(config.audio_channels, config.audio_dim)
        self.video_time, self.audio_time = TimestepEmbedding(config.dim), TimestepEmbedding(config.audio_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.video_head, self.audio_head = Head(config.dim, patch), Head(config.audio_dim, config.audio_channels)

    @classmethod
    def seeded(cls, config: ReferenceConfig, seed: int) -> AudioVideoDiT:
        """A model whose weights depend on ``seed`` only: every rank makes the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config).eval().requires_grad_(False)

    def forward(
        self,
        video: Tensor,
        audio: Tensor,
        video_timestep: Tensor,
        audio_timestep: Tensor,
        text: Tensor,
        transformer_options: Options | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One denoising prediction.

        Args:
            video: latent (B, C, F, H, W). audio: latent (B, A, C).
            video_timestep: (B, T) or (B, 1), in 0..1. audio_timestep: (B, A) or (B, 1).
            text: (B, L, C).

        Returns:
            predictions of the shapes of ``video`` and ``audio``.
        """
        grid = self.config.grid(video.shape)
        video_time = self.video_time(video_timestep.expand(video.size(0), prod(grid)))
        audio_time = self.audio_time(audio_timestep.expand(*audio.shape[:2]))
        ropes = (
            rope_3d(grid, self.config.head_dim, video.device),
            rope_3d((audio.size(1), 1, 1), self.config.audio_head_dim, audio.device),
        )
        x, y = self.video_in(self._patchify(video, grid)), self.audio_in(audio)
        for block in self.blocks:
            x, y = block(x, y, text, video_time, audio_time, *ropes, transformer_options=transformer_options)
        return self._unpatchify(self.video_head(x, video_time), grid), self.audio_head(y, audio_time)

    def _patchify(self, video: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """(B, C, F, H, W) to (B, T, C * patch)."""
        (f, h, w), (pf, ph, pw) = grid, self.config.patch
        return rearrange(video, "B C (f pf) (h ph) (w pw) -> B (f h w) (C pf ph pw)", f=f, h=h, w=w, pf=pf, ph=ph, pw=pw)

    def _unpatchify(self, x_BTC: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """(B, T, C * patch) to (B, C, F, H, W)."""
        (f, h, w), (pf, ph, pw) = grid, self.config.patch
        return rearrange(x_BTC, "B (f h w) (C pf ph pw) -> B C (f pf) (h ph) (w pw)", f=f, h=h, w=w, pf=pf, ph=ph, pw=pw)
