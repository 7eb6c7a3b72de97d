"""Attention in fp32, whatever comes in, so that two runs differ by the order of their sums only."""

import torch


def attend(q, k, v, tensor_layout, is_causal=False, mask=None, scale=None):
    """q, k, v: (B, T, H, D) for NHD, (B, H, T, D) for HND; returns fp32 of q's layout."""
    turn = tensor_layout == "NHD"
    q, k, v = ((x.transpose(1, 2) if turn else x).float() for x in (q, k, v))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    return out.transpose(1, 2) if turn else out
