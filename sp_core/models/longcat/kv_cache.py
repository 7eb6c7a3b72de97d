"""Cached keys and values of conditioning frames, which are the same in every step of a sampling run. Plain torch.

Shape legend: B batch, T tokens, C heads * head_dim, n conditioning frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import SPError

#: transformer option that turns the cache on; its value says where the cache lies: "gpu" (where the model computes) or "cpu"
KV_CACHE = "longcat_kv_cache"
#: transformer option: what else than the frames keys and values depend on, (hook, its strength) of a conditioning's hooks
HOOKS = "longcat_hooks"
#: least recently used conditioning frames beyond these are let go (context windows, several images in one batch)
KEPT = 8


@dataclass(eq=False)
class CacheEntry:
    """Keys and values of one batch item's conditioning frames, for each block, as attention saw them."""

    latent_CnHW: Tensor
    variant: Any
    #: block -> k, v (1, T_n, h * D) after RoPE, in raster order. Under sequence parallelism they are also after the exchange,
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
