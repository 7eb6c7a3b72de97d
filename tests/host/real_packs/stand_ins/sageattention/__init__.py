"""Stands in for SageAttention's kernels, which need a GPU: the same attention, exact, by torch."""

from .exact import attend


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, attn_mask=None, sm_scale=None, **kwargs):
    return attend(q, k, v, tensor_layout, is_causal, attn_mask, sm_scale)


sageattn_qk_int8_pv_fp16_cuda = sageattn_qk_int8_pv_fp16_triton = sageattn_qk_int8_pv_fp8_cuda = sageattn
