"""LongCat-Video's diffusion transformer, from the host's parts.

Needs ComfyUI. Module names are those of the official checkpoints; see :mod:`.keys` for the
other names in use. Modulation, gates, the norms that they touch and the final layer compute in
fp32 whatever the weights' type, as the model was trained.

Shape legend: B batch, F latent frames, T tokens, C hidden size, H heads, D head_dim, L text
tokens, E width of a timestep's embedding, R rows of modulation (one for all tokens, one a frame
or one a token), t tokens of a row. A frame's tokens lie together, frames in order. That also
holds for a rank's tile under sequence parallelism, so a block gives each row of modulation the
same number of its tokens.

Source: LongCat-Video (arXiv 2510.22200).
"""

from __future__ import annotations

import math
from typing import Any

import comfy.ldm.common_dit
import comfy.patcher_extension
import torch
import torch.nn.functional as nnf
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.flux.math import apply_rope
from comfy.ldm.modules.attention import optimized_attention
from comfy.ldm.wan.model import sinusoidal_embedding_1d
from einops import rearrange
from torch import Tensor, nn

from .conditioning import KV_CACHE, Conditioning, KVCache, conditioned_attention, zero_mask_prefix

_EPS = 1e-6
#: text tokens that the model was trained with
_TEXT_TOKENS = 512


def _in_fp32(layer: nn.Module) -> nn.Module:
    """Let a host layer compute in the type of its input: the host's casting of weights, always on."""
    layer.comfy_cast_weights = True  # type: ignore[assignment]
    return layer


def _by_row(x_BTC: Tensor, rows: int) -> Tensor:
    return rearrange(x_BTC, "B (R t) C -> B R t C", R=rows)


def _modulate(x_BTC: Tensor, shift_BR1C: Tensor, scale_BR1C: Tensor) -> Tensor:
    """LayerNorm without weights, then the scale and shift of each token's row; fp32 (B, T, C)."""
    x_BRtC = _by_row(nnf.layer_norm(x_BTC.float(), x_BTC.shape[-1:], eps=_EPS), shift_BR1C.size(1))
    return rearrange(torch.addcmul(shift_BR1C, x_BRtC, 1 + scale_BR1C), "B R t C -> B (R t) C")


def _gated(x_BTC: Tensor, y_BTC: Tensor, gate_BR1C: Tensor) -> Tensor:
    """x + gate * y in fp32, back in x's type."""
    y_BRtC = _by_row(y_BTC.float(), gate_BR1C.size(1)) * gate_BR1C
    return (x_BTC.float() + rearrange(y_BRtC, "B R t C -> B (R t) C")).to(x_BTC.dtype)


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
        self.q_norm = ops.RMSNorm(dim // num_heads, eps=_EPS, **made)
        self.k_norm = ops.RMSNorm(dim // num_heads, eps=_EPS, **made)
        self.proj = ops.Linear(dim, dim, **made)

    def forward(self, x: Tensor, freqs: Tensor, conditioning: Any = None, transformer_options: dict[str, Any] | None = None) -> Tensor:
        """x (B, T, C), freqs (1, T, 1, D / 2, 2, 2) -> (B, T, C).

        ``conditioning``: None, a :class:`Conditioning`, or what a sequence plan put in its
        place to carry it to the attention override.
        """
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q_BTHD, k_BTHD = (rearrange(x, "B T (H D) -> B T H D", H=self.num_heads) for x in (q, k))
        q_BTHD, k_BTHD = apply_rope(self.q_norm(q_BTHD), self.k_norm(k_BTHD), freqs)
        q, k = (rearrange(x, "B T H D -> B T (H D)") for x in (q_BTHD, k_BTHD))
        if isinstance(conditioning, Conditioning):
            out = conditioned_attention(q, k, v, self.num_heads, conditioning, transformer_options=transformer_options)
        else:
            out = optimized_attention(q, k, v, heads=self.num_heads, mask=conditioning, transformer_options=transformer_options or {})
        return self.proj(out)


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
        self.q_norm = ops.RMSNorm(dim // num_heads, eps=_EPS, **made)
        self.k_norm = ops.RMSNorm(dim // num_heads, eps=_EPS, **made)
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
    def __init__(self, dim: int, num_heads: int, ffn: int, embed: int, fused: tuple[bool, bool], ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), _in_fp32(ops.Linear(embed, 6 * dim, **made)))
        self.attn = SelfAttention(dim, num_heads, fused[0], ops, made)
        self.pre_crs_attn_norm = _in_fp32(ops.LayerNorm(dim, eps=_EPS, **made))
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
        dtype = x.dtype
        modulation = self.adaLN_modulation(e).unsqueeze(2)
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = modulation.chunk(6, -1)

        y = _modulate(x, shift_a, scale_a).to(dtype)
        y = self.attn(y, freqs, conditioning=conditioning, transformer_options=transformer_options)
        x = _gated(x, y, gate_a)

        # conditioning frames get no text at all, not even the projection's bias
        clean = conditioning.own_prefix(x.size(1)) if conditioning is not None else 0
        noisy = x[:, clean:]
        if noisy.size(1):
            noisy = noisy + self.cross_attn(
                self.pre_crs_attn_norm(noisy.float()).to(dtype), context, transformer_options=transformer_options
            )
            x = torch.cat([x[:, :clean], noisy], 1) if clean else noisy

        y = self.ffn(_modulate(x, shift_f, scale_f).to(dtype))
        return _gated(x, y, gate_f)


class FinalLayer(nn.Module):
    def __init__(self, dim: int, embed: int, out: int, ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), _in_fp32(ops.Linear(embed, 2 * dim, **made)))
        self.linear = _in_fp32(ops.Linear(dim, out, **made))

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        """x (B, T, C), e fp32 (B, 1, F or T, E) -> fp32 (B, T, channels of a patch)."""
        shift, scale = self.adaLN_modulation(e).unsqueeze(2).chunk(2, -1)
        return self.linear(_modulate(x, shift, scale))


class _Patchify(nn.Module):
    def __init__(self, channels: int, dim: int, patch: tuple[int, int, int], ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.proj = ops.Conv3d(channels, dim, kernel_size=patch, stride=patch, **made)


class _TimestepEmbedder(nn.Module):
    def __init__(self, frequencies: int, embed: int, ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.mlp = nn.Sequential(_in_fp32(ops.Linear(frequencies, embed, **made)), nn.SiLU(), _in_fp32(ops.Linear(embed, embed, **made)))


class _CaptionEmbedder(nn.Module):
    def __init__(self, channels: int, dim: int, ops: Any, made: dict[str, Any]) -> None:
        super().__init__()
        self.y_proj = nn.Sequential(ops.Linear(channels, dim, **made), nn.GELU(approximate="tanh"), ops.Linear(dim, dim, **made))


class LongCatVideoModel(nn.Module):
    """(B, 16, F, H, W) latents to what the host's flow samplers want: noise minus data, in fp32."""

    def __init__(
        self,
        hidden_size: int = 4096,
        num_heads: int = 32,
        depth: int = 48,
        in_channels: int = 16,
        out_channels: int = 16,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        ffn_hidden_size: int = 11008,
        adaln_tembed_dim: int = 512,
        frequency_embedding_size: int = 256,
        caption_channels: int = 4096,
        fused_qkv: bool = True,
        fused_kv: bool = True,
        image_model: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        operations: Any = None,
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.dtype, self.patch_size, self.out_channels = dtype, patch_size, out_channels
        self.in_channels, self.hidden_size, self.num_heads = in_channels, hidden_size, num_heads
        self.frequency_embedding_size = frequency_embedding_size
        #: lives as long as one sampling run; see :mod:`.conditioning`
        self.kv_cache = KVCache()

        self.x_embedder = _Patchify(in_channels, hidden_size, patch_size, operations, made)
        self.t_embedder = _TimestepEmbedder(frequency_embedding_size, adaln_tembed_dim, operations, made)
        self.y_embedder = _CaptionEmbedder(caption_channels, hidden_size, operations, made)
        fused = (fused_qkv, fused_kv)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, ffn_hidden_size, adaln_tembed_dim, fused, operations, made) for _ in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, adaln_tembed_dim, math.prod(patch_size) * out_channels, operations, made)
        d = hidden_size // num_heads
        self.rope_embedder = EmbedND(dim=d, theta=10000, axes_dim=[d - 4 * (d // 6), 2 * (d // 6), 2 * (d // 6)])

    def clear_cache(self) -> None:
        """A sampling run is over."""
        self.kv_cache.clear()

    def forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, transformer_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> Tensor:
        """Runs the host's DIFFUSION_MODEL wrappers around :meth:`_forward`."""
        options = {} if transformer_options is None else transformer_options
        wrappers = comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options)
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timestep, context, options, **kwargs)

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        transformer_options: dict[str, Any] | None = None,
        denoise_mask: Tensor | None = None,
        num_cond_latents: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One prediction.

        Args:
            x: (B, C, F, H, W); H and W need not divide by the patch.
            timestep: (B,), or (B, F) in thousandths; conditioning frames count as 0.
            context: (B, L, caption channels); rows of zeros are padding.
            denoise_mask: (B, C, F, H, W); the first frames where it is 0 are conditioning frames.
            num_cond_latents: their number, if the caller knows it.

        Returns:
            fp32, the shape of ``x``. Conditioning frames are 0 where cached keys and values stood in for them.
        """
        options = {} if transformer_options is None else transformer_options
        frames, height, width = x.shape[2:]
        clean = zero_mask_prefix(denoise_mask, frames) if num_cond_latents is None else min(num_cond_latents, frames)
        if clean:
            # clone: the caller's timesteps are not ours to change
            timestep = (timestep if timestep.ndim > 1 else timestep[:, None]).expand(-1, frames).clone()
            timestep[:, :clean] = 0
        x = comfy.ldm.common_dit.pad_to_patch_size(x, self.patch_size)
        grid = [size // patch for size, patch in zip(x.shape[2:], self.patch_size, strict=True)]
        freqs = self.rope_encode(grid, x.device, options)

        cache = None
        if KV_CACHE in options and 0 < clean < frames:
            cache = self.kv_cache.open(x[:, :, :clean], options.get("rope_options"), options[KV_CACHE])
        skipped = clean if cache is not None and cache.filled else 0
        conditioning = Conditioning(clean - skipped, frames - skipped, x.device, cache) if clean else None
        if skipped:
            x, timestep, freqs = x[:, :, skipped:], timestep[:, skipped:], freqs[:, skipped * grid[1] * grid[2] :]
        out = self.forward_tokens(x, timestep, context, freqs, conditioning, options)
        if cache is not None:
            self.kv_cache.commit(cache)
        if skipped:
            out = torch.cat([out.new_zeros(*out.shape[:2], skipped, *out.shape[3:]), out], 2)
        # the model was trained to predict data minus noise
        return -out[..., :height, :width]

    def forward_tokens(
        self, x: Tensor, timestep: Tensor, context: Tensor, freqs: Tensor, conditioning: Conditioning | None, options: dict[str, Any]
    ) -> Tensor:
        """Patchify, embed, blocks, final layer, unpatchify: fp32 (B, C, F, H, W), data minus noise."""
        latent = x
        x = self.x_embedder.proj(x)
        grid = x.shape[2:]
        options["grid_sizes"] = grid
        x = rearrange(x, "B C F H W -> B (F H W) C")
        e = self.embed_timestep(timestep)
        context = self.embed_text(context)

        replace = options.get("patches_replace", {}).get("dit", {})
        patches = options.get("patches", {}).get("double_block", [])
        options["total_blocks"], options["block_type"] = len(self.blocks), "double"
        for index, block in enumerate(self.blocks):
            options["block_index"] = index
            if ("double_block", index) in replace:

                def original(args: dict[str, Any], block: nn.Module = block) -> dict[str, Tensor]:
                    return {"img": block(args["img"], args["vec"], args["pe"], args["txt"], conditioning, args["transformer_options"])}

                args = {"img": x, "txt": context, "vec": e, "pe": freqs, "transformer_options": options}
                x = replace[("double_block", index)](args, {"original_block": original})["img"]
            else:
                x = block(x, e, freqs, context, conditioning=conditioning, transformer_options=options)
            for patch in patches:
                x = patch({"img": x, "x": latent, "vec": e, "block_index": index, "transformer_options": options})["img"]
        return self.unpatchify(self.final_layer(x, e), grid)

    def embed_timestep(self, timestep: Tensor) -> Tensor:
        """(B,) or (B, F) -> fp32 (B, 1 or F, E)."""
        rows = sinusoidal_embedding_1d(self.frequency_embedding_size, timestep.flatten())
        return rearrange(self.t_embedder.mlp(rows.float()), "(B F) E -> B F E", B=timestep.size(0))

    def embed_text(self, context: Tensor) -> Tensor:
        """(B, L, caption channels) -> (B, at most 512, C). Padding is zero before and after, but in between it has the biases."""
        context = context[:, :_TEXT_TOKENS]
        is_text_BL1 = context.ne(0).any(-1, keepdim=True)
        return self.y_embedder.y_proj(context) * is_text_BL1

    def rope_encode(self, grid: list[int], device: torch.device, options: dict[str, Any]) -> Tensor:
        """Rotations fp32 (1, T, 1, D / 2, 2, 2) of a token grid; the host's ``rope_options`` scale and shift its axes."""
        rope = options.get("rope_options") or {}
        axes = []
        for size, axis in zip(grid, "tyx", strict=True):
            positions = torch.arange(size, device=device, dtype=torch.float32)
            axes.append(positions * rope.get(f"scale_{axis}", 1.0) + rope.get(f"shift_{axis}", 0.0))
        ids_1T3 = rearrange(list(torch.meshgrid(*axes, indexing="ij")), "coordinate F H W -> 1 (F H W) coordinate")
        # the embedder has the heads before the tokens: (1, 1, T, D / 2, 2, 2)
        return self.rope_embedder(ids_1T3).movedim(1, 2)

    def unpatchify(self, x_BTC: Tensor, grid: torch.Size) -> Tensor:
        """(B, T, patch * channels) -> (B, channels, F, H, W); ``grid`` has f, h, w tokens."""
        (f, h, w), (pf, ph, pw) = grid, self.patch_size
        return rearrange(x_BTC, "B (f h w) (pf ph pw C) -> B C (f pf) (h ph) (w pw)", f=f, h=h, w=w, pf=pf, ph=ph, pw=pw)
