"""Attention on one device that also returns log-sum-exp, so that parts can be merged.

Uses the kernels behind ``torch.nn.functional.scaled_dot_product_attention`` by their aten
names: the public function drops the log-sum-exp that they compute. torch's own ring
attention calls the same names. A plain softmax covers what they do not.

Shape legend: B batch, T tokens (Tq queries, Tk keys), H heads, D head_dim.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from .masks import as_BHqk, check_mask, dead_rows, to_additive

# plain softmax: queries are taken in slices whose scores stay below this many elements
_SCORES_AT_ONCE = 1 << 24


class AttentionWithLse(Protocol):
    """Any attention that returns (out_BTHD, lse_BHT); what ring attention is built on."""

    def __call__(
        self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> tuple[Tensor, Tensor]: ...


def attention_with_lse(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale + mask) v and the natural log of its denominator. Forward only.

    Args:
        q_BTHD: (B, Tq, H, D), any float type; k_BTHD (B, Tk, H, D); v_BTHD (B, Tk, H, Dv).
        mask: see :mod:`sp_core.attention.masks`; bool or float.
        scale: D ** -0.5 when not given.

    Returns:
        out (B, Tq, H, Dv) in q's dtype, lse (B, H, Tq) in fp32 (fp64 for fp64 inputs). A query
        that may attend to nothing gives zeros and -inf, never NaN.

    Raises:
        ValueError: shapes do not fit; the message names the dim.
    """
    B, Tq, H, D = q_BTHD.shape
    Tk, Dv = k_BTHD.size(1), v_BTHD.size(3)
    if k_BTHD.shape != (B, Tk, H, D) or v_BTHD.shape != (B, Tk, H, Dv):
        raise ValueError(
            f"q {tuple(q_BTHD.shape)}, k {tuple(k_BTHD.shape)} and v {tuple(v_BTHD.shape)} do not agree in batch, key tokens or heads"
        )
    scale = D**-0.5 if scale is None else scale
    if mask is not None:
        mask = as_BHqk(mask)
        check_mask(mask, (B, H, Tq, Tk))
    if not (B and Tq and Tk and H):
        lse_type = torch.promote_types(q_BTHD.dtype, torch.float32)
        return q_BTHD.new_zeros(B, Tq, H, Dv), q_BTHD.new_full((B, H, Tq), -torch.inf, dtype=lse_type)
    q, k, v = (rearrange(x, "B T H D -> B H T D") for x in (q_BTHD, k_BTHD, v_BTHD))
    out, lse = _kernel(q, k, v, mask, scale)
    if mask is not None:
        # kernels disagree about a query without keys: some give NaN, some zero, some a mean, and any lse
        dead = dead_rows(mask)
        out, lse = out.masked_fill(dead, 0), lse.masked_fill(dead.squeeze(-1), -torch.inf)
    return rearrange(out, "B H T D -> B T H D"), lse


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets from attention over each: exact.

    ``parts``: (out_BTHD, lse_BHT) pairs; the results are fp32 (fp64 from fp64). Source: Milakov
    and Gimelshein's online softmax, as in FlashAttention and Ring Attention.
    """
    lse_nBHT = torch.stack([lse for _, lse in parts])
    total_BHT = lse_nBHT.logsumexp(0)
    # -inf minus -inf is NaN: a row without keys anywhere has weight 0 everywhere
    weights_nBHT = (lse_nBHT - total_BHT).exp().masked_fill_(total_BHT == -torch.inf, 0)
    out = sum(out.to(lse_nBHT.dtype) * rearrange(weight, "B H T -> B T H 1") for (out, _), weight in zip(parts, weights_nBHT, strict=True))
    assert isinstance(out, Tensor)
    return out, total_BHT


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """All (B, H, T, D). cuDNN's kernel is left out: its log-sum-exp differs in shape by version."""
    aten = torch.ops.aten
    same_width = q.size(-1) == v.size(-1)
    if q.device.type == "cpu" and same_width and q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        mask = None if mask is None else to_additive(mask, q.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    if q.device.type == "cuda" and same_width and k.dtype == v.dtype == q.dtype:
        if mask is None and q.size(-1) % 8 == 0 and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, False)):
            out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
            return out, lse
        bias = None if mask is None else _aligned_bias(mask, q, k)
        if can_use_efficient_attention(SDPAParams(q, k, v, bias, 0.0, False, False)):
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
            return out, lse[..., : q.size(2)]  # its lse is padded to whole tiles
    return _softmax(q, k, v, mask, scale)


def _aligned_bias(mask_BHqk: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The efficient kernel wants q's dtype, rows that start on 16 elements, and all four dims."""
    bias = to_additive(mask_BHqk, q.dtype)
    keys = k.size(2)
    padded = bias.new_zeros(*bias.shape[:-1], -(-keys // 16) * 16)
    padded[..., :keys] = bias
    return padded[..., :keys].expand(q.size(0), q.size(1), q.size(2), keys)


def _softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The definition, in fp32 or better, a slice of queries at a time."""
    work = torch.promote_types(q.dtype, torch.float32)
    k_BHDk, v_BHkD = k.to(work).transpose(-1, -2), v.to(work)
    step = max(1, _SCORES_AT_ONCE // math.prod((*k.shape[:2], k.size(2))))
    outs, lses = [], []
    for start in range(0, q.size(2), step):
        q_BHqD = q[:, :, start : start + step].to(work) * scale
        scores_BHqk = q_BHqD @ k_BHDk
        if mask is not None:
            rows = mask if mask.size(2) == 1 else mask[:, :, start : start + step]
            scores_BHqk = scores_BHqk + to_additive(rows, work)
        lse_BHq1 = scores_BHqk.logsumexp(-1, keepdim=True)
        # a huge finite mask value swallows the sum's log: normalise by the sum itself
        top_BHq1 = scores_BHqk.amax(-1, keepdim=True)
        weights = (scores_BHqk - top_BHq1).exp()
        outs.append((weights / weights.sum(-1, keepdim=True)) @ v_BHkD)
        lses.append(lse_BHq1.squeeze(-1))
    return torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 2)
