"""Parts of the reference model.

Attention is called as ComfyUI's models call it: an ``optimized_attention_override`` in the
transformer options takes the place of :func:`attention`.

Shape legend: B batch, T tokens, S tokens that are attended to, H heads, D head_dim, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

Options = Mapping[str, Any]


def attention(q_BTC: Tensor, k_BSC: Tensor, v_BSC: Tensor, heads: int, mask: Tensor | None = None, **_: Any) -> Tensor:
    """softmax(q k^T) v, (B, T, H * D); a bool ``mask`` (B, H, T, S) is true where a query may look."""
    q, k, v = (rearrange(x, "B T (H D) -> B H T D", H=heads) for x in (q_BTC, k_BSC, v_BSC))
    return rearrange(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), "B H T D -> B T (H D)")


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, options: Options | None) -> Tensor:
    """:func:`attention`, or what the options put in its place."""
    options = options or {}
    override = options.get("optimized_attention_override")
    if override is None:
        return attention(q, k, v, heads)
    return override(attention, q, k, v, heads, transformer_options=options)  # type: ignore[no-any-return]


def rope_3d(grid: Sequence[int], head_dim: int, device: torch.device) -> Tensor:
    """Angles for tokens on a (frames, rows, columns) grid: (1, T, 1, D / 2). An axis gets a third of the channels, time the rest."""
    pairs = head_dim // 2
    shares = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
    places = torch.meshgrid(*(torch.arange(size, device=device, dtype=torch.float32) for size in grid), indexing="ij")
    angles = [
        place.flatten()[:, None] * 10000 ** -(torch.arange(share, device=device, dtype=torch.float32) / share)
        for place, share in zip(places, shares, strict=True)
    ]
    return torch.cat(angles, 1)[None, :, None]


def rotate(x_BTHD: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of channels by ``angles`` (1, T, 1, D / 2)."""
    first, second = x_BTHD.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    """Queries from one sequence, keys and values from it or from another."""

    def __init__(self, dim: int, context_dim: int, inner_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k = nn.Linear(dim, inner_dim), nn.Linear(context_dim, inner_dim)
        self.to_v, self.to_out = nn.Linear(context_dim, inner_dim), nn.Linear(inner_dim, dim)
        self.norm_q, self.norm_k = nn.RMSNorm(inner_dim), nn.RMSNorm(inner_dim)

    def forward(
        self, x_BTC: Tensor, context_BSC: Tensor | None = None, rope: Tensor | None = None, transformer_options: Options | None = None
    ) -> Tensor:
        context_BSC = x_BTC if context_BSC is None else context_BSC
        q, k, v = self.norm_q(self.to_q(x_BTC)), self.norm_k(self.to_k(context_BSC)), self.to_v(context_BSC)
        if rope is not None:
            q, k = (rotate(rearrange(x, "B T (H D) -> B T H D", H=self.heads), rope).flatten(2) for x in (q, k))
        return self.to_out(attend(q, k, v, self.heads, transformer_options))  # type: ignore[no-any-return]


class TimestepEmbedding(nn.Module):
    """A timestep for each token, (B, T), to channels, (B, T, C)."""

    def __init__(self, dim: int, frequencies: int = 64) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(2 * frequencies, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, timestep_BT: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(self.frequencies, device=timestep_BT.device) / self.frequencies)
        angles = 1000 * timestep_BT[..., None] * rates
        return self.mlp(torch.cat((angles.cos(), angles.sin()), -1))  # type: ignore[no-any-return]


class Modulation(nn.Module):
    """``count`` rows of channels for each token, from its time embedding: (B, T, C) to ``count`` times (B, T, C)."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count, self.linear = count, nn.Linear(dim, count * dim)

    def forward(self, time_BTC: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(time_BTC)).chunk(self.count, -1)  # type: ignore[no-any-return]


def feed_forward(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without weights, then scale and shift by token."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
