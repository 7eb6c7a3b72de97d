"""Layers that LongCat-Video-Avatar adds to LongCat-Video's: video tokens read the sound of their own frame.

Needs ComfyUI. Shape legend: B batch, F latent frames, f noisy frames, T tokens, C hidden size, H
heads, D head_dim, N audio tokens of a frame (of all voices, end to end), A their width, m masks.

Source: LongCat-Video-Avatar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from comfy.ldm.flux.math import apply_rope1, rope
from comfy.ldm.modules.attention import optimized_attention
from einops import rearrange
from torch import Tensor, nn

from .conditioning import Conditioning
from .layers import EPS, Block, SelfAttention, by_row, gated, in_fp32, modulate
from .people import extremes, key_places, query_places, split_maps, with_columns


@dataclass(frozen=True, eq=False)
class Sound:
    """What the noisy frames of one forward hear."""

    tokens_BfNA: Tensor
    #: how many voices these are
    voices: int
    #: masks that tell who speaks where; 0 where there is one voice
    masks: int


class AvatarSelfAttention(SelfAttention):
    """Also tells how much each token looks at each person of the first frame."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        freqs: Tensor,
        conditioning: Any = None,
        transformer_options: dict[str, Any] | None = None,
        masks: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """As the base's; the output and, with masks, the maps (B, T, m)."""
        q, k, v = self.qkv_of(x, freqs)
        if not masks:
            return self.proj(self.attend(q, k, v, conditioning, transformer_options or {})), None
        seen = self.attend(q, k, with_columns(v, self.num_heads, masks), conditioning, transformer_options or {})
        out, maps_BTm = split_maps(seen, self.num_heads, masks)
        return self.proj(out), maps_BTm


class Extremes(nn.Module):
    """:func:`.people.extremes` as a module, so that the sequence plan can join those of all ranks."""

    def forward(self, maps_BTm: Tensor) -> Tensor:
        return extremes(maps_BTm)


class AudioAttention(nn.Module):
    """Queries are the noisy frames' tokens; each frame has its own keys and values."""

    def __init__(self, dim: int, num_heads: int, audio_dim: int, ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.q_linear = ops.Linear(dim, dim, **made)
        self.kv_linear = ops.Linear(audio_dim, 2 * dim, **made)
        self.q_norm = ops.RMSNorm(self.head_dim, eps=EPS, **made)
        self.k_norm = ops.RMSNorm(self.head_dim, eps=EPS, **made)
        self.proj = ops.Linear(dim, dim, **made)
        self.extremes = Extremes()

    def forward(self, x: Tensor, sound: Sound, maps_BTm: Tensor | None, transformer_options: dict[str, Any] | None = None) -> Tensor:
        """x (B, T, C) of the noisy frames' tokens -> (B, T, C)."""
        frames = sound.tokens_BfNA.size(1)
        q = self.q_norm(rearrange(self.q_linear(x), "B T (H D) -> B T H D", H=self.num_heads))
        k, v = self.kv_linear(sound.tokens_BfNA).chunk(2, -1)
        k = self.k_norm(rearrange(k, "B f N (H D) -> (B f) N H D", H=self.num_heads))
        if maps_BTm is not None:
            places_BT = query_places(maps_BTm, self.extremes(maps_BTm))
            places_1N = key_places(sound.voices, k.size(1) // sound.voices, maps_BTm.size(2), k.device)[None]
            q, k = (apply_rope1(t, rope(at, self.head_dim, 10000).unsqueeze(2)) for t, at in ((q, places_BT), (k, places_1N)))
        q = rearrange(q, "B (f t) H D -> (B f) t (H D)", f=frames)
        k, v = rearrange(k, "B N H D -> B N (H D)"), rearrange(v, "B f N C -> (B f) N C")
        out = optimized_attention(q, k, v, heads=self.num_heads, transformer_options=transformer_options or {})
        return self.proj(rearrange(out, "(B f) t C -> B (f t) C", f=frames))


class AvatarBlock(Block):
    def __init__(
        self,
        dim: int,
        num_heads: int,
        ffn: int,
        embed: int,
        fused: tuple[bool, bool],
        ops: Any,
        made: dict[str, Any],
        audio_dim: int,
    ) -> None:
        super().__init__(dim, num_heads, ffn, embed, fused, ops, made, AvatarSelfAttention)
        self.audio_adaLN_modulation = nn.Sequential(nn.SiLU(), in_fp32(ops.Linear(embed, 3 * dim, **made)))
        self.pre_video_crs_attn_norm = in_fp32(ops.LayerNorm(dim, eps=EPS, **made))
        self.audio_cross_attn = AudioAttention(dim, num_heads, audio_dim, ops, made)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        e: Tensor,
        freqs: Tensor,
        context: Tensor,
        conditioning: Conditioning | None = None,
        sound: Sound | None = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> Tensor:
        """As the base's, and what the noisy frames hear."""
        assert sound is not None
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = self.modulation(e)
        y = modulate(x, shift_a, scale_a).to(x.dtype)
        y, maps = self.attn(y, freqs, conditioning=conditioning, transformer_options=transformer_options, masks=sound.masks)
        x = gated(x, y, gate_a)
        x = self.with_text(x, context, conditioning, transformer_options)
        x = self.with_sound(x, e, sound, maps, conditioning, transformer_options)
        return gated(x, self.ffn(modulate(x, shift_f, scale_f).to(x.dtype)), gate_f)

    def with_sound(
        self,
        x: Tensor,
        e: Tensor,
        sound: Sound,
        maps_BTm: Tensor | None,
        conditioning: Conditioning | None,
        transformer_options: dict[str, Any] | None,
    ) -> Tensor:
        """x plus what its tokens hear. Conditioning frames hear nothing, so they get literal zeros."""
        clean = conditioning.own_prefix(x.size(1)) if conditioning is not None else 0
        noisy = x[:, clean:]
        maps = None if maps_BTm is None else maps_BTm[:, clean:]
        y = self.audio_cross_attn(self.pre_video_crs_attn_norm(noisy.float()).to(x.dtype), sound, maps, transformer_options)
        rows = e if conditioning is None or e.size(1) == 1 else e[:, conditioning.frames :]
        shift, scale, gate = self.audio_adaLN_modulation(rows).unsqueeze(2).chunk(3, -1)
        # the norm and the modulation are of what was heard, not of what hears
        heard = by_row(nnf.layer_norm(y.float(), y.shape[-1:], eps=EPS), gate.size(1))
        heard = rearrange(torch.addcmul(shift, heard, 1 + scale) * gate, "B R t C -> B (R t) C")
        noisy = (noisy.float() + heard).to(x.dtype)
        return torch.cat([x[:, :clean], noisy], 1) if clean else noisy
