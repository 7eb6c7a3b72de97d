"""Attention masks under sequence parallelism: every rank holds the mask of all tokens, and narrows it where a kernel runs.

A mask is bool (True may attend) or float (added to the scores), and in rank order
(:func:`to_rank_order`). Accepted shapes: (Tq, Tk), (B, Tq, Tk), (B, H, Tq, Tk). Any dim may
be 1 and is then broadcast; a key-only mask is (1, 1, Tk).

Shape legend: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ..layout import SequenceLayout

# at and below this an added mask value swallows any real score, in every float type that
# has it: such a row attends by its mask alone
_SWALLOWS = -1e30


def as_BHqk(mask: Tensor) -> Tensor:
    """A view of ``mask`` with four dims.

    Raises:
        ValueError: it has neither two, three nor four.
    """
    if mask.dim() == 2:
        return mask[None, None]
    if mask.dim() == 3:
        return mask[:, None]
    if mask.dim() == 4:
        return mask
    raise ValueError(f"an attention mask has 2, 3 or 4 dims, this one has {mask.dim()}: shape {tuple(mask.shape)}")


def to_rank_order(mask: Tensor, layout: SequenceLayout, *, replicated: int = 0, queries: bool = True) -> Tensor:
    """A mask in raster order, put into the order that attention sees.

    Args:
        mask: (..., Tq, Tk); a dim that is broadcast stays as it is.
        replicated: so many tokens stand before the layout's (text in joint attention) and keep their places.
        queries: the queries are the layout's tokens too; else only the keys are.
    """
    order = layout.order()
    if order is None:
        return mask
    order = torch.cat([torch.arange(replicated), order + replicated]).to(mask.device)
    for dim in (-1, -2) if queries else (-1,):
        if mask.size(dim) == order.numel():
            mask = mask.index_select(dim, order)
    return mask


def check_mask(mask_BHqk: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Refuse a mask that does not broadcast to ``shape`` = (B, H, Tq, Tk).

    Raises:
        ValueError: names the dim and both sizes.
    """
    for name, have, want in zip(("batch", "heads", "query tokens", "key tokens"), mask_BHqk.shape, shape, strict=True):
        if have not in (1, want):
            raise ValueError(f"the attention mask has {have} entries for {want} {name} (mask shape {tuple(mask_BHqk.shape)})")


def narrow_mask(mask_BHqk: Tensor, dim: int, start: int, count: int) -> Tensor:
    """``count`` entries of one dim as a view; a dim that is broadcast stays as it is."""
    return mask_BHqk if mask_BHqk.size(dim) == 1 else mask_BHqk.narrow(dim, start, count)


def dead_rows(mask_BHqk: Tensor) -> Tensor:
    """Bool (B, H, Tq, 1): True where a query may attend to no key at all."""
    alive = mask_BHqk if mask_BHqk.dtype == torch.bool else mask_BHqk > -torch.inf
    return ~alive.any(dim=-1, keepdim=True)


def to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores of ``dtype``. Finite stays finite: fp32's minimum would become bf16's -inf."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    if mask.dtype == dtype:
        return mask
    # clamped behind the cast: neither type need have the other's least value
    return mask.to(dtype).clamp_(min=torch.finfo(dtype).min).masked_fill_(mask == -torch.inf, -torch.inf)


def level_rows(q_BTHD: Tensor, mask_BHqk: Tensor) -> tuple[Tensor, Tensor]:
    """Make float masks safe to evaluate in blocks of keys: (q, shift (B, H, Tq, 1)).

    Some masks "forbid" with a huge finite number. A row that may attend to no key is then the
    average over all keys, and its log-sum-exp is that number, in which the sum is lost. So blocks
    of keys could not be weighed against each other. The caller subtracts ``shift`` from the row
    before, which does not change its softmax. Where the number swallows the scores, q is zeroed,
    as the scores would have been.
    """
    top = mask_BHqk.amax(dim=-1, keepdim=True).to(torch.promote_types(q_BTHD.dtype, torch.float32))
    shift = torch.where((top < -1e3) & (top > -torch.inf), top, 0)
    swallowed_BTH1 = rearrange(shift <= _SWALLOWS, "B H T 1 -> B T H 1")
    return q_BTHD.masked_fill(swallowed_BTH1, 0), shift
