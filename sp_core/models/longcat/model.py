"""LongCat-Video's diffusion transformer, of the layers in :mod:`.layers`.

Needs ComfyUI. Module names are those of the official checkpoints; see :mod:`.keys` for the
other names in use.

Shape legend: B batch, F latent frames, T tokens, C hidden size, D head_dim, L text tokens, E width
of a timestep's embedding. A frame's tokens lie together, frames in order.

Source: LongCat-Video (arXiv 2510.22200).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.ldm.common_dit
import comfy.patcher_extension
import torch
from comfy.ldm.flux.layers import EmbedND
from einops import rearrange
from torch import Tensor, nn

from ...attention.block_sparse import BlockSparse
from .conditioning import Conditioning, Part, frame_parts, zero_mask_prefix
from .kv_cache import HOOKS, KV_CACHE, CachedPass, KVCache
from .layers import Block, CaptionEmbedder, FinalLayer, Patchify, TimestepEmbedder
from .people import People

#: text tokens that the model was trained with
_TEXT_TOKENS = 512
#: transformer option that turns block-sparse attention on: the arguments of :class:`BlockSparse`
BLOCK_SPARSE = "longcat_block_sparse"


def _sinusoids(timestep_N: Tensor, width: int) -> Tensor:
    """Cosines, then sines, fp32 (N, width).

    The frequencies come from an exponential, as in training: times 1000 their last bit moves the result more than all else does.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=timestep_N.device, dtype=torch.float32) * (-math.log(10000) / half))
    angles = timestep_N.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


@dataclass(frozen=True, eq=False)
class FrameRules:
    """What the frames of one forward are to each other."""

    #: how many first frames are conditioning frames
    clean: int
    parts: tuple[Part, ...]
    #: place of each frame in time, where they are not 0, 1, 2 and so on
    positions: tuple[int, ...] | None = None
    people: People | None = None

    def conditioning(self, grid: list[int], device: torch.device, cache: CachedPass | None, options: dict[str, Any]) -> Conditioning | None:
        """None where all tokens simply attend to all."""
        sparse = BlockSparse(**options[BLOCK_SPARSE]) if BLOCK_SPARSE in options else None
        if not self.clean and sparse is None:
            return None
        skipped = self.clean if cache is not None and cache.filled else 0
        parts = tuple(part for part in self.parts if part.queries.start >= skipped)
        frame = (grid[1], grid[2])
        return Conditioning(self.clean - skipped, grid[0] - skipped, parts, device, cache, skipped, self.people, sparse, frame)


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
        block: Callable[..., Block] | None = None,
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

        self.x_embedder = Patchify(in_channels, hidden_size, patch_size, operations, made)
        self.t_embedder = TimestepEmbedder(frequency_embedding_size, adaln_tembed_dim, operations, made)
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size, operations, made)
        fused = (fused_qkv, fused_kv)
        self.blocks = nn.ModuleList(
            (block or Block)(hidden_size, num_heads, ffn_hidden_size, adaln_tembed_dim, fused, operations, made) for _ in range(depth)
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
        frames = x.size(2)
        clean = zero_mask_prefix(denoise_mask, frames) if num_cond_latents is None else min(num_cond_latents, frames)
        return self.predict(x, timestep, context, options, FrameRules(clean, frame_parts(clean, frames)))

    def predict(
        self, x: Tensor, timestep: Tensor, context: Tensor, options: dict[str, Any], rules: FrameRules, **for_blocks: Any
    ) -> Tensor:
        """One prediction of (B, C, F, H, W), noise minus data, by what the frames are to each other. ``for_blocks`` goes to each block."""
        frames, height, width = x.shape[2:]
        clean = rules.clean
        if clean:
            # clone: the caller's timesteps are not ours to change
            timestep = (timestep if timestep.ndim > 1 else timestep[:, None]).expand(-1, frames).clone()
            timestep[:, :clean] = 0
        x = comfy.ldm.common_dit.pad_to_patch_size(x, self.patch_size)
        grid = [size // patch for size, patch in zip(x.shape[2:], self.patch_size, strict=True)]
        freqs = self.rope_encode(grid, x.device, options, rules.positions)

        cache = None
        if KV_CACHE in options and 0 < clean < frames:
            variant = (options.get("rope_options"), rules.positions, options.get(HOOKS))
            cache = self.kv_cache.open(x[:, :, :clean], variant, options[KV_CACHE])
        skipped = clean if cache is not None and cache.filled else 0
        conditioning = rules.conditioning(grid, x.device, cache, options)
        if skipped:
            x, timestep, freqs = x[:, :, skipped:], timestep[:, skipped:], freqs[:, skipped * grid[1] * grid[2] :]
        out = self.forward_tokens(x, timestep, context, freqs, conditioning, options, for_blocks)
        if cache is not None:
            self.kv_cache.commit(cache)
        if skipped:
            out = torch.cat([out.new_zeros(*out.shape[:2], skipped, *out.shape[3:]), out], 2)
        # the model was trained to predict data minus noise
        return -out[..., :height, :width]

    def forward_tokens(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        freqs: Tensor,
        conditioning: Conditioning | None,
        options: dict[str, Any],
        for_blocks: dict[str, Any],
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
                    given = {"conditioning": conditioning, "transformer_options": args["transformer_options"], **for_blocks}
                    return {"img": block(args["img"], args["vec"], args["pe"], args["txt"], **given)}

                args = {"img": x, "txt": context, "vec": e, "pe": freqs, "transformer_options": options}
                x = replace[("double_block", index)](args, {"original_block": original})["img"]
            else:
                x = block(x, e, freqs, context, conditioning=conditioning, transformer_options=options, **for_blocks)
            for patch in patches:
                x = patch({"img": x, "x": latent, "vec": e, "block_index": index, "transformer_options": options})["img"]
        return self.unpatchify(self.final_layer(x, e), grid)

    def embed_timestep(self, timestep: Tensor) -> Tensor:
        """(B,) or (B, F) -> fp32 (B, 1 or F, E)."""
        rows = _sinusoids(timestep.flatten(), self.frequency_embedding_size)
        return rearrange(self.t_embedder.mlp(rows), "(B F) E -> B F E", B=timestep.size(0))

    def embed_text(self, context: Tensor) -> Tensor:
        """(B, L, caption channels) -> (B, at most 512, C). Padding is zero before and after, but in between it has the biases."""
        context = context[:, :_TEXT_TOKENS]
        is_text_BL1 = context.ne(0).any(-1, keepdim=True)
        return self.y_embedder.y_proj(context) * is_text_BL1

    def rope_encode(self, grid: list[int], device: torch.device, options: dict[str, Any], frames: tuple[int, ...] | None = None) -> Tensor:
        """Rotations fp32 (1, T, 1, D / 2, 2, 2) of a token grid; the host's ``rope_options`` scale and shift its axes.

        ``frames``: places of the frames in time, where they are not 0, 1, 2 and so on.
        """
        rope = options.get("rope_options") or {}
        axes = []
        for size, axis in zip(grid, "tyx", strict=True):
            places = frames if axis == "t" and frames is not None else range(size)
            positions = torch.tensor(list(places), device=device, dtype=torch.float32)
            axes.append(positions * rope.get(f"scale_{axis}", 1.0) + rope.get(f"shift_{axis}", 0.0))
        ids_1T3 = rearrange(list(torch.meshgrid(*axes, indexing="ij")), "coordinate F H W -> 1 (F H W) coordinate")
        # the embedder has the heads before the tokens: (1, 1, T, D / 2, 2, 2)
        return self.rope_embedder(ids_1T3).movedim(1, 2)

    def unpatchify(self, x_BTC: Tensor, grid: torch.Size) -> Tensor:
        """(B, T, patch * channels) -> (B, channels, F, H, W); ``grid`` has f, h, w tokens."""
        (f, h, w), (pf, ph, pw) = grid, self.patch_size
        return rearrange(x_BTC, "B (f h w) (pf ph pw C) -> B C (f pf) (h ph) (w pw)", f=f, h=h, w=w, pf=pf, ph=ph, pw=pw)
