"""Attention masks under sequence parallelism: global masks, cut where a kernel runs.

A mask is whole on every rank (bool: True may attend; float: added to the scores) and in
rank order (:func:`to_rank_order`). Accepted shapes, where any axis
may be 1 and is then broadcast: (Tq, Tk), (B, Tq, Tk), (B, H, Tq, Tk). A key-only mask is
(1, 1, Tk). Shape legend: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import SequenceLayout

# at and below this an added mask value swallows any real score, in every float type that
# has it: such a row attends by its mask alone
_SWALLOWS = -1e30


def as_BHqk(mask: Tensor) -> Tensor:
    """A view of ``mask`` with four axes.

    Raises:
        ValueError: it has neither two, three nor four.
    """
    if mask.dim() == 2:
        return mask[None, None]
    if mask.dim() == 3:
        return mask[:, None]
    if mask.dim() == 4:
        return mask
    raise ValueError(f"an attention mask has 2, 3 or 4 axes, this one has {mask.dim()}: shape {tuple(mask.shape)}")


def to_rank_order(mask_BHqk: Tensor, layout: SequenceLayout) -> Tensor:
    """A self-attention mask in raster order, its queries and keys put into the order that attention sees."""
    order = layout.order()
    if order is None:
        return mask_BHqk
    order = order.to(mask_BHqk.device)
    for axis in (2, 3):
        if mask_BHqk.size(axis) != 1:
            mask_BHqk = mask_BHqk.index_select(axis, order)
    return mask_BHqk


def check_mask(mask_BHqk: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Refuse a mask that does not broadcast to ``shape`` = (B, H, Tq, Tk).

    Raises:
        ValueError: names the axis and both sizes.
    """
    for axis, have, want in zip(("batch", "heads", "query tokens", "key tokens"), mask_BHqk.shape, shape, strict=True):
        if have not in (1, want):
            raise ValueError(f"the attention mask has {have} entries for {want} {axis} (mask shape {tuple(mask_BHqk.shape)})")


def cut_axis(mask_BHqk: Tensor, axis: int, start: int, count: int) -> Tensor:
    """``count`` entries of one axis as a view; a broadcast axis stays as it is."""
    return mask_BHqk if mask_BHqk.size(axis) == 1 else mask_BHqk.narrow(axis, start, count)


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
    return mask.clamp(min=torch.finfo(dtype).min).to(dtype).masked_fill_(mask == -torch.inf, -torch.inf)


def level_rows(q_BTHD: Tensor, mask_BHqk: Tensor) -> tuple[Tensor, Tensor]:
    """Make float masks safe to evaluate in blocks of keys: (q, shift (B, H, Tq, 1)).

    Masks that "forbid" with a huge finite number leave a row without a real key an average
    over all keys; its log-sum-exp is that number, in which the sum is lost, so blocks could not
    be weighed. Subtract ``shift`` from the row first: softmax does not see it. Where the
    number swallows the scores, q is zeroed, as the scores would have been.
    """
    top = mask_BHqk.amax(dim=-1, keepdim=True).to(torch.promote_types(q_BTHD.dtype, torch.float32))
    shift = torch.where((top < -1e3) & (top > -torch.inf), top, 0)
    swallowed_BTH1 = (shift <= _SWALLOWS).transpose(1, 2)
    return q_BTHD.masked_fill(swallowed_BTH1, 0), shift
