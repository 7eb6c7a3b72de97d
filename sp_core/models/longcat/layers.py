"""Layers of LongCat-Video's diffusion transformer, from the host's parts.

Needs ComfyUI. Module names are those of the official checkpoints. Modulation, gates, the norms that
they touch and the final layer compute in fp32 whatever the weights' type, as the model was trained.

Shape legend: B batch, F latent frames, T tokens, C hidden size, H heads, D head_dim, L text
tokens, E width of a timestep's embedding, R rows of modulation (one for all tokens, one a frame
or one a token), t tokens of a row. A frame's tokens lie together, frames in order. That also
holds for a rank's tile under sequence parallelism, so a block gives each row of modulation the
same number of its tokens.

Source: LongCat-Video (arXiv 2510.22200).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as nnf
from comfy.ldm.flux.math import apply_rope
from comfy.ldm.modules.attention import optimized_attention
from einops import rearrange
from torch import Tensor, nn

from .conditioning import Conditioning, conditioned_attention

EPS = 1e-6


def in_fp32(layer: nn.Module) -> nn.Module:
    """Let a host layer compute in the type of its input: the host's casting of weights, always on."""
    layer.comfy_cast_weights = True  # type: ignore[assignment]
    return layer


def by_row(x_BTC: Tensor, rows: int) -> Tensor:
    return rearrange(x_BTC, "B (R t) C -> B R t C", R=rows)


def modulate(x_BTC: Tensor, shift_BR1C: Tensor, scale_BR1C: Tensor) -> Tensor:
    """LayerNorm without weights, then the scale and shift of each token's row; fp32 (B, T, C)."""
    x_BRtC = by_row(nnf.layer_norm(x_BTC.float(), x_BTC.shape[-1:], eps=EPS), shift_BR1C.size(1))
    return rearrange(torch.addcmul(shift_BR1C, x_BRtC, 1 + scale_BR1C), "B R t C -> B (R t) C")


def gated(x_BTC: Tensor, y_BTC: Tensor, gate_BR1C: Tensor) -> Tensor:
    """x + gate * y in fp32 and at once, back in x's type."""
    x_BRtC, y_BRtC = (by_row(x.float(), gate_BR1C.size(1)) for x in (x_BTC, y_BTC))
    return rearrange(torch.addcmul(x_BRtC, y_BRtC, gate_BR1C), "B R t C -> B (R t) C").to(x_BTC.dtype)


class SelfAttention(nn.Module):
    """3-D RoPE and per-head norms; q, k, v fused in one projection or apart, as the checkpoint has them."""

    #: attention by a :class:`Conditioning`, for the sequence plan, which brings all tokens together first
    #: (:class:`sp_core.plans.frame_conditioning.FrameAttention`)
    attend_in_frames = staticmethod(conditioned_attention)

    def __init__(self, dim: int, num_heads: int, fused: bool, ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads, self.fused = num_heads, fused
        if fused:
            self.qkv = ops.Linear(dim, 3 * dim, **made)
        else:
            self.q, self.k, self.v = (ops.Linear(dim, dim, **made) for _ in range(3))
        self.q_norm = ops.RMSNorm(dim // num_heads, eps=EPS, **made)
        self.k_norm = ops.RMSNorm(dim // num_heads, eps=EPS, **made)
        self.proj = ops.Linear(dim, dim, **made)

    def forward(self, x: Tensor, freqs: Tensor, conditioning: Any = None, transformer_options: dict[str, Any] | None = None) -> Tensor:
        """x (B, T, C), freqs (1, T, 1, D / 2, 2, 2) -> (B, T, C).

        ``conditioning``: None, a :class:`Conditioning`, or what a sequence plan put in its
        place to carry it to the attention override.
        """
        return self.proj(self.attend(*self.qkv_of(x, freqs), conditioning, transformer_options or {}))

    def qkv_of(self, x: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k with norm and RoPE, and v: (B, T, C) each."""
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q_BTHD, k_BTHD = (rearrange(x, "B T (H D) -> B T H D", H=self.num_heads) for x in (q, k))
        q_BTHD, k_BTHD = apply_rope(self.q_norm(q_BTHD), self.k_norm(k_BTHD), freqs)
        q, k = (rearrange(x, "B T H D -> B T (H D)") for x in (q_BTHD, k_BTHD))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, conditioning: Any, options: dict[str, Any]) -> Tensor:
        if isinstance(conditioning, Conditioning):
            return conditioned_attention(q, k, v, self.num_heads, conditioning, transformer_options=options)
        return optimized_attention(q, k, v, heads=self.num_heads, mask=conditioning, transformer_options=options)  # type: ignore[no-any-return]


class CrossAttention(nn.Module):
    """Video queries, text keys and values; norms per head, no RoPE."""

    def __init__(self, dim: int, num_heads: int, fused: bool, ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads, self.fused = num_heads, fused
        self.q_linear = ops.Linear(dim, dim, **made)
        if fused:
            self.kv_linear = ops.Linear(dim, 2 * dim, **made)
        else:
            self.k_linear, self.v_linear = (ops.Linear(dim, dim, **made) for _ in range(2))
        self.q_norm = ops.RMSNorm(dim // num_heads, eps=EPS, **made)
        self.k_norm = ops.RMSNorm(dim // num_heads, eps=EPS, **made)
        self.proj = ops.Linear(dim, dim, **made)

    def forward(self, x: Tensor, context: Tensor, transformer_options: dict[str, Any] | None = None) -> Tensor:
        """x (B, T, C), context (B, L, C) -> (B, T, C)."""
        k, v = self.kv_linear(context).chunk(2, -1) if self.fused else (self.k_linear(context), self.v_linear(context))
        q_BTHD, k_BLHD = (rearrange(x, "B N (H D) -> B N H D", H=self.num_heads) for x in (self.q_linear(x), k))
        q, k = (rearrange(x, "B N H D -> B N (H D)") for x in (self.q_norm(q_BTHD), self.k_norm(k_BLHD)))
        return self.proj(optimized_attention(q, k, v, heads=self.num_heads, transformer_options=transformer_options or {}))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int, ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.w1 = ops.Linear(dim, hidden, bias=False, **made)
        self.w2 = ops.Linear(hidden, dim, bias=False, **made)
        self.w3 = ops.Linear(dim, hidden, bias=False, **made)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nnf.silu(self.w1(x)).mul_(self.w3(x)))


class Block(nn.Module):
    def __init__(
        self,
        dim: int,
        num_heads: int,
        ffn: int,
        embed: int,
        fused: tuple[bool, bool],
        ops: Any,
        made: dict[str, Any],
        attention: type[SelfAttention] = SelfAttention,
    ) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), in_fp32(ops.Linear(embed, 6 * dim, **made)))
        self.attn = attention(dim, num_heads, fused[0], ops, made)
        self.pre_crs_attn_norm = in_fp32(ops.LayerNorm(dim, eps=EPS, **made))
        self.cross_attn = CrossAttention(dim, num_heads, fused[1], ops, made)
        self.ffn = SwiGLU(dim, ffn, ops, made)

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        freqs: Tensor,
        context: Tensor,
        conditioning: Conditioning | None = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> Tensor:
        """x (B, T, C), e fp32 (B, 1, F or T, E), freqs (1, T, 1, D / 2, 2, 2), context (B, L, C) -> (B, T, C)."""
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = self.modulation(e)
        y = modulate(x, shift_a, scale_a).to(x.dtype)
        x = gated(x, self.attn(y, freqs, conditioning=conditioning, transformer_options=transformer_options), gate_a)
        x = self.with_text(x, context, conditioning, transformer_options)
        return gated(x, self.ffn(modulate(x, shift_f, scale_f).to(x.dtype)), gate_f)

    def modulation(self, e: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and gate of the attention, then of the feed-forward: fp32 (B, R, 1, C) each."""
        return self.adaLN_modulation(e).unsqueeze(2).chunk(6, -1)

    def with_text(
        self, x: Tensor, context: Tensor, conditioning: Conditioning | None, transformer_options: dict[str, Any] | None
    ) -> Tensor:
        """x plus what its tokens read in the text. Conditioning frames get none at all, not even the projection's bias."""
        clean = conditioning.own_prefix(x.size(1)) if conditioning is not None else 0
        noisy = x[:, clean:]
        if not noisy.size(1):
            return x
        y = self.pre_crs_attn_norm(noisy.float()).to(x.dtype)
        noisy = noisy + self.cross_attn(y, context, transformer_options=transformer_options)
        return torch.cat([x[:, :clean], noisy], 1) if clean else noisy


class FinalLayer(nn.Module):
    def __init__(self, dim: int, embed: int, out: int, ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), in_fp32(ops.Linear(embed, 2 * dim, **made)))
        self.linear = in_fp32(ops.Linear(dim, out, **made))

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        """x (B, T, C), e fp32 (B, 1, F or T, E) -> fp32 (B, T, channels of a patch)."""
        shift, scale = self.adaLN_modulation(e).unsqueeze(2).chunk(2, -1)
        return self.linear(modulate(x, shift, scale))


class Patchify(nn.Module):
    def __init__(self, channels: int, dim: int, patch: tuple[int, int, int], ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.proj = ops.Conv3d(channels, dim, kernel_size=patch, stride=patch, **made)


class TimestepEmbedder(nn.Module):
    def __init__(self, frequencies: int, embed: int, ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.mlp = nn.Sequential(in_fp32(ops.Linear(frequencies, embed, **made)), nn.SiLU(), in_fp32(ops.Linear(embed, embed, **made)))


class CaptionEmbedder(nn.Module):
    def __init__(self, channels: int, dim: int, ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.y_proj = nn.Sequential(ops.Linear(channels, dim, **made), nn.GELU(approximate="tanh"), ops.Linear(dim, dim, **made))
