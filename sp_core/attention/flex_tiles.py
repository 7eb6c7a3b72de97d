"""Attention between tiles by torch's ``flex_attention``: the kept tiles become its block mask, and its kernel never sees the others.

The kernel exists only where torch compiles it; uncompiled, flex_attention computes all tokens with all tokens and then
masks. So whoever calls this decides for which devices that pays. It has not run on a GPU yet.

Shape legend: B batch, H heads, T tokens, D head_dim, Q and K tiles of queries and of keys, q and k tokens of one tile, n kept tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from einops import rearrange
from torch import Tensor

from ..errors import SPError

#: the tables of one call take at most this many bytes; heads beyond that are another call
_TABLE_BYTES = 256 * 2**20
#: two tables of int32 and one of bool
_BYTES_OF_A_PAIR = 9


def attend_tiles(
    q_BHQqD: Tensor,
    k_BHKkD: Tensor,
    v_BHKkD: Tensor,
    index_BHQn: Tensor,
    counts_BHQ: Tensor | None,
    real_Kk: Tensor | None,
    flex: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Each tile of queries with the keys and values of its kept tiles: (B, H, Q, q, D), zeros where it keeps none.

    Args:
        index_BHQn: int64, the kept tiles; ``counts_BHQ`` how many of these n count, None where all do.
        real_Kk: which keys are tokens and which fill a tile up; None where all are tokens.
        flex: torch's ``flex_attention``; None compiles it.

    Raises:
        SPError: torch cannot compile the kernel for this device.
    """
    sizes = (q_BHQqD.size(3), k_BHKkD.size(3))
    tiles = (q_BHQqD.size(2), k_BHKkD.size(2))
    q, k, v = (rearrange(x, "B H N n D -> B H (N n) D") for x in (q_BHQqD, k_BHKkD, v_BHKkD))
    at_once = _heads_at_once(q.size(1), q.size(0) * tiles[0] * tiles[1] * _BYTES_OF_A_PAIR)
    # no larger than a tile: torch's own choice may be, and is refused then
    options = {"BLOCK_M": sizes[0], "BLOCK_N": sizes[1]}
    parts = []
    for first in range(0, q.size(1), at_once):
        at = slice(first, first + at_once)
        mask = block_mask(index_BHQn[:, at], None if counts_BHQ is None else counts_BHQ[:, at], real_Kk, tiles, sizes)
        parts.append(_call(flex, q[:, at], k[:, at], v[:, at], mask, options))
    out = rearrange(torch.cat(parts, 1), "B H (Q q) D -> B H Q q D", Q=tiles[0])
    if counts_BHQ is not None:
        out = out.masked_fill((counts_BHQ == 0)[..., None, None], 0)
    return out


def block_mask(
    index_BHQn: Tensor, counts_BHQ: Tensor | None, real_Kk: Tensor | None, tiles: tuple[int, int], sizes: tuple[int, int]
) -> Any:
    """torch's ``BlockMask`` of the kept tiles: which are computed whole, and which with a mask since some of their keys are no tokens.

    Args:
        tiles: how many of queries and of keys.
        sizes: tokens of a tile of queries and of one of keys.
    """
    from torch.nn.attention.flex_attention import BlockMask

    counted_BHQn = torch.ones_like(index_BHQn, dtype=torch.bool)
    if counts_BHQ is not None:
        counted_BHQn = torch.arange(index_BHQn.size(3), device=index_BHQn.device) < counts_BHQ[..., None]
    whole_K = torch.ones(tiles[1], dtype=torch.bool, device=index_BHQn.device) if real_Kk is None else real_Kk.all(1)
    whole_BHQn = whole_K[index_BHQn]
    kept_BHQK = torch.zeros(*index_BHQn.shape[:3], tiles[1], dtype=torch.bool, device=index_BHQn.device)
    kept_BHQK = kept_BHQK.scatter(-1, index_BHQn, counted_BHQn)
    in_part, in_full = (_listed(index_BHQn, counted_BHQn & chosen, tiles[1]) for chosen in (~whole_BHQn, whole_BHQn))
    return BlockMask(
        seq_lengths=(tiles[0] * sizes[0], tiles[1] * sizes[1]),
        kv_num_blocks=in_part[0],
        kv_indices=in_part[1],
        full_kv_num_blocks=in_full[0],
        full_kv_indices=in_full[1],
        # for gradients
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=sizes,
        mask_mod=_mask_of(kept_BHQK, None if real_Kk is None else real_Kk.flatten(), sizes),
    )


def _listed(index_BHQn: Tensor, chosen_BHQn: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """How many tiles are chosen (B, H, Q), and which, in order and in front (B, H, Q, ``width``); int32."""
    front = index_BHQn.masked_fill(~chosen_BHQn, width).sort(-1).values
    front = front.masked_fill(front == width, 0).int()
    return chosen_BHQn.sum(-1, dtype=torch.int32), nnf.pad(front, (0, width - front.size(3)))


def _mask_of(kept_BHQK: Tensor, real_T: Tensor | None, sizes: tuple[int, int]) -> Callable[..., Tensor]:
    """Token by token what the tables say: the kernel asks in tiles that are not computed whole, uncompiled torch everywhere."""
    q_size, k_size = sizes

    def kept(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return kept_BHQK[b, h, query // q_size, key // k_size]

    def kept_and_real(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert real_T is not None
        return kept(b, h, query, key) & real_T[key]

    return kept if real_T is None else kept_and_real


def _heads_at_once(heads: int, bytes_of_a_head: int) -> int:
    """The most heads that divide all of them, so that every call has one shape, and whose tables are not too large; at least one."""
    fitting = [count for count in range(1, heads + 1) if heads % count == 0 and count * bytes_of_a_head <= _TABLE_BYTES]
    return max(fitting, default=1)


def _call(flex: Callable[..., Tensor] | None, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, int]) -> Tensor:
    if flex is not None:
        return flex(q, k, v, block_mask=mask, kernel_options=options)
    try:
        return _compiled()(q, k, v, block_mask=mask, kernel_options=options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        why = next(iter(str(error).strip().splitlines()), "")
        raise SPError(
            f"torch could not compile flex_attention for {q.device} ({type(error).__name__}: {why}): "
            "set kernel of LongCat Block-Sparse Attention to gather"
        ) from error


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """One for the process, for torch compiles anew for another. Whole graphs only: torch's way out would be all tokens with all."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)  # type: ignore[return-value]
