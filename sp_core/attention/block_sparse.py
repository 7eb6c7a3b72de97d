"""Block-sparse attention: tiles of queries attend to those tiles of keys that look most like them. Exact.

Plain torch gathers the kept tiles; on CUDA torch's flex_attention can leave out the others in a kernel (:mod:`.flex_tiles`).

A video's tokens are a raster (T, H, W). They are regrouped into three-dimensional tiles; a tile of
queries keeps the tiles of keys whose mean has the largest product with its own mean. Inside the
kept tiles attention is the usual one. Where a size does not divide by the tile, the last tiles
are smaller: what fills them up takes no part in a mean, in a softmax or in the result.

Shape legend: B batch, H heads, T tokens, D head_dim, Q and K tiles of queries and of keys, q and k
tokens of one tile, n kept tiles, C tiles that are computed at once. Source: LongCat-Video (arXiv 2510.22200), refinement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from einops import rearrange
from torch import Tensor

from .flex_tiles import attend_tiles

Grid = Sequence[int]
#: keys and values that are gathered at once take at most this many bytes: on a CPU what its caches hold
_CHUNK_BYTES, _CHUNK_BYTES_OF_A_CPU = 256 * 2**20, 4 * 2**20


@dataclass(frozen=True)
class BlockSparse:
    """Which tiles are kept.

    ``sparsity`` is the share of key tiles that is left out: of N tiles ``int((1 - sparsity) * N)`` are kept, at the least.
    ``cdf_threshold`` keeps the best tiles as long as their softmax weights sum up to no more than that.
    """

    sparsity: float | None = 0.9375
    cdf_threshold: float | None = None
    query_tile: Sequence[int] = (4, 4, 4)
    key_tile: Sequence[int] = (4, 4, 4)
    #: compute by torch's flex_attention where the tokens are on a CUDA device
    flex: bool = False

    def kept(self, key_grid: Grid) -> int:
        """How many tiles of keys each tile of queries keeps at most; all where that depends on the scores."""
        count = math.prod(tile_counts(key_grid, self.key_tile))
        return count if self.sparsity is None or self.cdf_threshold is not None else int((1 - self.sparsity) * count)


def tile_counts(grid: Grid, tile: Sequence[int]) -> tuple[int, ...]:
    """Tiles along each dim, the last of which may be smaller."""
    return tuple(-(-size // edge) for size, edge in zip(grid, tile, strict=True))


def block_sparse_attention(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, query_grid: Grid, key_grid: Grid, setting: BlockSparse
) -> Tensor:
    """Attention of each tile of queries to the tiles of keys that it keeps: (B, H, T, D), zeros where it keeps none.

    Args:
        q_BHTD, k_BHTD, v_BHTD: in raster order.
        query_grid, key_grid: (frames, rows, columns) of the tokens.
    """
    q, q_real = to_tiles(q_BHTD, query_grid, setting.query_tile)
    k, k_real = to_tiles(k_BHTD, key_grid, setting.key_tile)
    v, _ = to_tiles(v_BHTD, key_grid, setting.key_tile)
    index_BHQn, counts_BHQ = keep(_means(q, q_real), _means(k, k_real), setting)
    attend = attend_tiles if setting.flex and q.device.type == "cuda" else _attend
    out_BHQqD = attend(q, k, v, index_BHQn, counts_BHQ, k_real)
    return from_tiles(out_BHQqD, query_grid, setting.query_tile)


def to_tiles(x_BHTD: Tensor, grid: Grid, tile: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Tokens by tiles (B, H, N, n, D), and which of them are real (N, n); None where all are."""
    counts, (t, h, w) = tile_counts(grid, tile), tile
    missing = [edge * count - size for edge, count, size in zip(tile, counts, grid, strict=True)]
    x = rearrange(x_BHTD, "B H (T Y X) D -> B H T Y X D", T=grid[0], Y=grid[1])
    pattern = "B H (T t) (Y h) (X w) D -> B H (T Y X) (t h w) D"
    if not any(missing):
        return rearrange(x, pattern, t=t, h=h, w=w), None
    padding = (0, missing[2], 0, missing[1], 0, missing[0])
    real = nnf.pad(torch.ones(tuple(grid), dtype=torch.bool, device=x.device), padding)
    tiles = rearrange(nnf.pad(x, (0, 0, *padding)), pattern, t=t, h=h, w=w)
    return tiles, rearrange(real, "(T t) (Y h) (X w) -> (T Y X) (t h w)", t=t, h=h, w=w)


def from_tiles(x_BHNnD: Tensor, grid: Grid, tile: Sequence[int]) -> Tensor:
    """The reverse of :func:`to_tiles`: (B, H, T, D)."""
    (T, Y, _), (t, h, w) = tile_counts(grid, tile), tile
    pattern = "B H (T Y X) (t h w) D -> B H (T t) (Y h) (X w) D"
    x = rearrange(x_BHNnD, pattern, T=T, Y=Y, t=t, h=h, w=w)
    return rearrange(x[:, :, : grid[0], : grid[1], : grid[2]], "B H T Y X D -> B H (T Y X) D")


def _means(x_BHNnD: Tensor, real_Nn: Tensor | None) -> Tensor:
    """Mean of each tile's tokens, in their type: (B, H, N, D)."""
    if real_Nn is None:
        return x_BHNnD.mean(3)
    return x_BHNnD.sum(3) / real_Nn.sum(1, keepdim=True).to(x_BHNnD.dtype)


def keep(q_BHQD: Tensor, k_BHKD: Tensor, setting: BlockSparse) -> tuple[Tensor, Tensor | None]:
    """The kept tiles of keys, from the tiles' means.

    Returns:
        int64 (B, H, Q, n), best first, and how many of these n count (B, H, Q); None where all do.
    """
    scores = q_BHQD @ k_BHKD.transpose(2, 3)
    most = 0 if setting.sparsity is None else int((1 - setting.sparsity) * k_BHKD.size(2))
    if setting.cdf_threshold is None:
        return scores.topk(most, dim=-1).indices, None
    weights, order = (scores.float() * q_BHQD.size(3) ** -0.5).softmax(-1).sort(-1, descending=True)
    counts = (weights.cumsum(-1) <= setting.cdf_threshold).sum(-1).clamp_min(most)
    return order[..., : int(counts.max())], counts


def _attend(q: Tensor, k: Tensor, v: Tensor, index_BHQn: Tensor, counts_BHQ: Tensor | None, k_real: Tensor | None) -> Tensor:
    """Each tile of queries (B, H, Q, q, D) with the keys and values of its kept tiles, gathered chunk by chunk."""
    B, H, Q, n = index_BHQn.shape
    if not n:
        return torch.zeros_like(q)
    K, tile, D = k.shape[2:]
    # tiles of all batch items and heads in one row, so that one index finds any of them
    first = torch.arange(B * H, device=q.device).view(B, H, 1, 1) * K
    places = rearrange(index_BHQn + first, "B H Q n -> (B H Q) n")
    q_rows, k_rows, v_rows = (rearrange(x, "B H N n D -> (B H N) n D") for x in (q, k, v))
    counts = None if counts_BHQ is None else counts_BHQ.flatten()
    out = torch.empty_like(q_rows)
    most = _CHUNK_BYTES_OF_A_CPU if q.device.type == "cpu" else _CHUNK_BYTES
    chunk = max(1, most // (2 * n * tile * D * q.element_size()))
    for start in range(0, B * H * Q, chunk):
        at = slice(start, start + chunk)
        chosen = places[at].flatten()
        k_Ck, v_Ck = (rearrange(x.index_select(0, chosen), "(C n) k D -> C 1 (n k) D", n=n) for x in (k_rows, v_rows))
        mask = _mask(places[at], None if counts is None else counts[at], k_real, K, tile)
        seen = nnf.scaled_dot_product_attention(q_rows[at, None], k_Ck, v_Ck, attn_mask=mask)
        if counts is not None:
            seen = seen.masked_fill((counts[at] == 0)[:, None, None, None], 0)  # a softmax over nothing is no number
        out[at] = seen[:, 0]
    return rearrange(out, "(B H Q) q D -> B H Q q D", B=B, H=H)


def _mask(places_Cn: Tensor, counts_C: Tensor | None, real_Kk: Tensor | None, tiles: int, tile: int) -> Tensor | None:
    """Which of the gathered keys take part, bool (C, 1, 1, n * k); None where all do."""
    if counts_C is None and real_Kk is None:
        return None
    C, n = places_Cn.shape
    mask = torch.ones(C, n, tile, dtype=torch.bool, device=places_Cn.device)
    if real_Kk is not None:
        mask &= real_Kk[places_Cn % tiles]
    if counts_C is not None:
        mask &= (torch.arange(n, device=mask.device) < counts_C[:, None])[..., None]
    return rearrange(mask, "C n k -> C 1 1 (n k)")
