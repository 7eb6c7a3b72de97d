"""Conditioning frames: clean first frames that attend to themselves alone, and their cached keys and values.

Needs ComfyUI: attention goes through its ``optimized_attention``, so that overrides work.

Shape legend: B batch, T tokens, H heads, D head_dim, n conditioning frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor

from ...errors import SPError
from ...plans.frame_conditioning import FrameConditioning

#: transformer option that turns the cache on; its value says where the cache lies: "gpu" (where the model computes) or "cpu"
KV_CACHE = "longcat_kv_cache"
#: least recently used conditioning frames beyond these are let go (context windows, several images in one batch)
KEPT = 8


@dataclass(eq=False)
class CacheEntry:
    """Keys and values of one batch item's conditioning frames, for each block, as attention saw them."""

    latent_CnHW: Tensor
    variant: Any
    #: block -> k, v (1, T_n, h * D) after RoPE. Under sequence parallelism they are also after the exchange,
    #: so a rank keeps its own heads of all tokens and sends nothing of them again
    blocks: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def matches(self, latent_CnHW: Tensor, variant: Any) -> bool:
        mine = self.latent_CnHW
        return (
            self.variant == variant
            and mine.shape == latent_CnHW.shape
            and mine.dtype == latent_CnHW.dtype
            and torch.equal(mine, latent_CnHW)
        )


@dataclass(eq=False)
class CachedPass:
    """One forward's use of the cache: every batch item has its entry, which is full or will be filled."""

    entries: list[CacheEntry]
    filled: bool
    device: str = "gpu"

    def write(self, block: int, k_BTC: Tensor, v_BTC: Tensor) -> None:
        for item, entry in enumerate(self.entries):
            if block not in entry.blocks:
                place = "cpu" if self.device == "cpu" else k_BTC.device
                k, v = (x[item : item + 1].to(place, copy=True) for x in (k_BTC, v_BTC))
                entry.blocks[block] = (k, v)

    def read(self, block: int, like_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (B, T_n, C) for all batch items.

        Raises:
            SPError: the block did not run when the cache was filled.
        """
        if any(block not in entry.blocks for entry in self.entries):
            raise SPError(
                f"block {block} was left out when the conditioning frames were cached but runs now: "
                "skipping blocks in some steps only does not go together with LongCat KV Cache; remove one of the two"
            )
        if all(entry is self.entries[0] for entry in self.entries):
            k, v = (x.to(like_BTC).expand(len(self.entries), -1, -1) for x in self.entries[0].blocks[block])
            return k, v
        k, v = (torch.cat([entry.blocks[block][i].to(like_BTC) for entry in self.entries]) for i in (0, 1))
        return k, v


class KVCache:
    """Entries of a model, found by the content of the conditioning frames: cond and uncond share one."""

    def __init__(self) -> None:
        self.entries: list[CacheEntry] = []

    def open(self, latent_BCnHW: Tensor, variant: Any, device: str) -> CachedPass:
        """Find or prepare the entries of a batch. A pass that is not committed leaves nothing behind."""
        entries: list[CacheEntry] = []
        filled = True
        for latent in latent_BCnHW:
            known = next((entry for entry in self.entries if entry.matches(latent, variant)), None)
            filled &= known is not None
            new = known or next((entry for entry in entries if entry.matches(latent, variant)), None)
            entries.append(new or CacheEntry(latent.clone(), variant))
        return CachedPass(entries, filled, device)

    def commit(self, done: CachedPass) -> None:
        """The forward went through: its entries are complete, and the most recently used ones."""
        used = list({id(entry): entry for entry in done.entries}.values())
        others = [entry for entry in self.entries if all(entry is not other for other in used)]
        self.entries = [*others, *used][-max(KEPT, len(used)) :]

    def clear(self) -> None:
        self.entries = []


@dataclass(frozen=True, eq=False)
class Conditioning(FrameConditioning):
    """Which tokens of one pass are conditioning frames. It stands where attention has its mask.

    They are the first ``frames`` of ``total`` frames, so they are a prefix of the tokens, also of a
    rank's own. A pass holds none of them when their keys and values come from a filled cache.
    """

    frames: int
    total: int
    device: torch.device
    cache: CachedPass | None = None
    #: how many of this rank's own tokens are conditioning, where it has a part of the sequence
    own: int | None = None
    #: places of conditioning and other tokens in the order that attention sees, where that is not raster order
    rows: tuple[Tensor, Tensor] | None = None

    def for_rank(self, own_t: Tensor, order_T: Tensor | None, tokens: int) -> Conditioning:
        """See :class:`FrameConditioning`."""
        first = self.prefix(tokens)
        clean = replace(self, own=int((own_t < first).sum()))
        if order_T is None or not self.frames:
            return clean
        rows = tuple(which.nonzero().squeeze(1).to(self.device) for which in (order_T < first, order_T >= first))
        return replace(clean, rows=(rows[0], rows[1]))

    def prefix(self, tokens: int) -> int:
        """How many of all tokens are conditioning."""
        return tokens * self.frames // self.total

    def own_prefix(self, tokens: int) -> int:
        """How many of this process's own ``tokens`` tokens are conditioning."""
        return self.prefix(tokens) if self.own is None else self.own

    def split(self, tokens: int) -> tuple[slice | Tensor, slice | Tensor]:
        """Places of conditioning and of other tokens, for attention that sees all ``tokens``."""
        first = self.prefix(tokens)
        return self.rows or (slice(0, first), slice(first, tokens))


def zero_mask_prefix(denoise_mask: Tensor | None, frames: int) -> int:
    """How many first frames a denoise mask (B, C, F, H, W) leaves untouched everywhere: the conditioning frames."""
    if denoise_mask is None or denoise_mask.ndim != 5 or denoise_mask.size(2) != frames:
        return 0
    untouched_F = denoise_mask.amax(dim=(0, 1, 3, 4)) == 0
    return int(untouched_F.int().cumprod(0).sum())


def conditioned_attention(
    q_BTC: Tensor,
    k_BTC: Tensor,
    v_BTC: Tensor,
    heads: int,
    conditioning: Conditioning,
    attn_precision: Any = None,
    transformer_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Self-attention where conditioning tokens attend to conditioning tokens and all others to everything.

    q, k and v hold all tokens, (B, T, heads * D) each, so one exchange of them serves both parts.

    Source: LongCat-Video, image-to-video and continuation.
    """
    options = transformer_options or {}
    block = options.get("block_index", 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return optimized_attention(q, k, v, heads=heads, attn_precision=attn_precision, transformer_options=options)

    cache = conditioning.cache
    if cache is not None and cache.filled:
        k_cached, v_cached = cache.read(block, k_BTC)
        return attend(q_BTC, torch.cat([k_cached, k_BTC], 1), torch.cat([v_cached, v_BTC], 1))
    clean, noisy = conditioning.split(q_BTC.size(1))
    k_clean, v_clean = k_BTC[:, clean], v_BTC[:, clean]
    if cache is not None:
        cache.write(block, k_clean, v_clean)
    out = torch.empty_like(q_BTC)
    out[:, clean] = attend(q_BTC[:, clean], k_clean, v_clean)
    q_noisy = q_BTC[:, noisy]
    if q_noisy.size(1):
        out[:, noisy] = attend(q_noisy, k_BTC, v_BTC)
    return out
