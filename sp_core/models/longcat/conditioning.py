"""Conditioning frames: clean first frames that attend to themselves alone. Which frames attend to which, and attention by it.

Needs ComfyUI: attention goes through its ``optimized_attention``, so that overrides work.

Shape legend: B batch, T tokens, S tokens of a frame, H heads, D head_dim, n conditioning frames, m masks of people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from comfy.ldm.modules.attention import optimized_attention
from einops import rearrange
from torch import Tensor

from ...attention.block_sparse import BlockSparse, block_sparse_attention
from ...errors import SPError
from ...plans.frame_conditioning import FrameConditioning
from .kv_cache import CachedPass
from .people import People


@dataclass(frozen=True)
class Part:
    """Frames whose tokens attend to the same frames; both are ranges of the video's frames, conditioning frames first."""

    queries: range
    keys: range


def frame_parts(clean: int, total: int) -> tuple[Part, ...]:
    """Clean frames attend to themselves, all others to everything.

    Source: LongCat-Video, image-to-video and continuation.
    """
    parts = (Part(range(clean), range(clean)), Part(range(clean, total), range(total)))
    return tuple(part for part in parts if part.queries)


@dataclass(frozen=True, eq=False)
class Conditioning(FrameConditioning):
    """Which frames of one pass attend to which. It stands where attention has its mask.

    Conditioning frames are the first ``frames`` of the pass's ``total`` frames, so they are a prefix of the tokens, also of
    a rank's own. Where their keys and values come from a filled cache, the pass has none of them: it begins with frame
    ``cached`` of the video.
    """

    frames: int
    total: int
    parts: tuple[Part, ...]
    device: torch.device
    cache: CachedPass | None = None
    cached: int = 0
    #: who speaks where: attention then also tells how much each token looks at each person
    people: People | None = None
    #: attention between tiles of tokens that look alike, instead of all
    sparse: BlockSparse | None = None
    #: rows and columns of tokens, which a sparse attention needs
    frame: tuple[int, int] = (0, 0)
    #: how many of this rank's own tokens are conditioning, where it has a part of the sequence
    own: int | None = None
    #: place of each raster token in the order that attention sees, int64 (T,), where that is not raster order
    places: Tensor | None = None

    def for_rank(self, own_t: Tensor, order_T: Tensor | None, tokens: int) -> Conditioning:
        """See :class:`FrameConditioning`."""
        own = int((own_t < tokens * self.frames // self.total).sum())
        places = None if order_T is None else order_T.argsort().to(self.device)
        return replace(self, own=own, places=places)

    def own_prefix(self, tokens: int) -> int:
        """How many of this process's own ``tokens`` tokens are conditioning."""
        return tokens * self.frames // self.total if self.own is None else self.own

    @property
    def all_frames(self) -> range:
        """Of the video, those in the cache among them."""
        return range(self.cached + self.total)

    def at(self, frames: range, tokens: int) -> slice | Tensor:
        """Places of the tokens of some of the video's frames, in raster order, among the pass's ``tokens`` tokens."""
        a_frame = tokens // self.total
        where = slice((frames.start - self.cached) * a_frame, (frames.stop - self.cached) * a_frame)
        return where if self.places is None else self.places[where]


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
    """Self-attention where each frame attends to those that ``conditioning`` names.

    q, k and v hold all tokens, (B, T, heads * D) each, so one exchange of them serves all parts.
    With people each head of v and of the result is m wider: there the result says how much each
    token looks at each person.
    """
    options = transformer_options or {}
    people, sparse = conditioning.people, conditioning.sparse
    if people is not None:
        v_BTC = people.without_columns(v_BTC, heads)
    if sparse is not None and conditioning.places is not None:
        # tiles of tokens need their neighbours
        places, conditioning = conditioning.places, replace(conditioning, places=None)
        q, k, v = (x.index_select(1, places) for x in (q_BTC, k_BTC, v_BTC))
        out = torch.empty_like(q_BTC)
        out[:, places] = _attend_by_parts(q, k, v, heads, conditioning, attn_precision, options)
        return out
    return _attend_by_parts(q_BTC, k_BTC, v_BTC, heads, conditioning, attn_precision, options)


def _attend_by_parts(
    q_BTC: Tensor,
    k_BTC: Tensor,
    v_BTC: Tensor,
    heads: int,
    conditioning: Conditioning,
    attn_precision: Any,
    options: Mapping[str, Any],
) -> Tensor:
    keys = _Keys(k_BTC, v_BTC, conditioning, options.get("block_index", 0))
    dense = partial(optimized_attention, heads=heads, attn_precision=attn_precision, transformer_options=options)
    own = range(conditioning.cached, conditioning.cached + conditioning.total)
    out: Tensor | None = None
    for part in conditioning.parts:
        k, v = keys.of(part.keys)
        alone = part.queries == own
        at = slice(None) if alone else conditioning.at(part.queries, q_BTC.size(1))
        if conditioning.sparse is not None and len(part.queries) > 1:
            seen = _sparse(q_BTC[:, at], k, v, heads, conditioning, part)
        else:
            seen = dense(q_BTC[:, at], k, v)
        if alone:
            out = seen
        else:
            out = torch.empty_like(q_BTC) if out is None else out
            out[:, at] = seen
    assert out is not None
    if conditioning.people is None:
        return out
    return conditioning.people.with_maps(out, q_BTC, keys.of(range(1))[0], heads)


def _sparse(q_BTC: Tensor, k_BTC: Tensor, v_BTC: Tensor, heads: int, conditioning: Conditioning, part: Part) -> Tensor:
    assert conditioning.sparse is not None
    q, k, v = (rearrange(x, "B T (H D) -> B H T D", H=heads) for x in (q_BTC, k_BTC, v_BTC))
    grids = [(len(frames), *conditioning.frame) for frames in (part.queries, part.keys)]
    if not conditioning.sparse.kept(grids[1]):
        raise SPError(
            f"LongCat Block-Sparse Attention keeps no part of a video of {grids[1][0]} x {grids[1][1]} x {grids[1][2]} tokens "
            f"at a sparsity of {conditioning.sparse.sparsity}: it is too small. Lower the sparsity, or remove the node"
        )
    return rearrange(block_sparse_attention(q, k, v, grids[0], grids[1], conditioning.sparse), "B H T D -> B T (H D)")


class _Keys:
    """Keys and values of all frames, those from the cache in front; fills the cache where it is to be filled."""

    def __init__(self, k_BTC: Tensor, v_BTC: Tensor, conditioning: Conditioning, block: int) -> None:
        cache, self.conditioning = conditioning.cache, conditioning
        self.k, self.v = k_BTC, v_BTC
        self.tokens = k_BTC.size(1)
        if cache is None:
            return
        if cache.filled:
            k_cached, v_cached = cache.read(block, k_BTC)
            self.k, self.v = torch.cat([k_cached, k_BTC], 1), torch.cat([v_cached, v_BTC], 1)
        else:
            at = conditioning.at(range(conditioning.frames), self.tokens)
            cache.write(block, k_BTC[:, at], v_BTC[:, at])

    def of(self, frames: range) -> tuple[Tensor, Tensor]:
        """k, v (B, T', C) of some of the video's frames. They are in raster order where they are not all."""
        if frames == self.conditioning.all_frames:
            return self.k, self.v
        if self.conditioning.cached:
            # the cache is in raster order and stands in front, so whole frames can be cut off there
            a_frame = self.tokens // self.conditioning.total
            stop = None if frames.stop == self.conditioning.all_frames.stop else frames.stop * a_frame
            at: slice | Tensor = slice(frames.start * a_frame, stop)
        else:
            at = self.conditioning.at(frames, self.tokens)
        return self.k[:, at], self.v[:, at]
