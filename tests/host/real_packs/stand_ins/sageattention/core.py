"""Stands in for the parts of SageAttention that packs call by themselves: nothing is quantised, so its scales are None.

It says that the device is of the one architecture whose attention is a Python function.
"""

from .exact import attend


def get_cuda_arch_versions():
    return ["sm75"]


def per_block_int8_triton(q, k, **kwargs):
    return q, None, k, None


def attn_false(q, k, v, q_scale, k_scale, tensor_layout="HND", output_dtype=None, attn_mask=None, return_lse=False):
    return attend(q, k, v, tensor_layout, mask=attn_mask).to(output_dtype), None


def _none(*args, **kwargs):
    raise NotImplementedError("this machine has no GPU of that architecture")


per_thread_int8_triton = per_warp_int8_cuda = per_channel_fp8 = _none
