"""Stands in for the block-sparse kernel of SpargeAttn, which needs a GPU."""

from sageattention.exact import attend


def block_sparse_sage2_attn_cuda(q, k, v, mask_id, tensor_layout="HND", **kwargs):
    """``mask_id``: (B, H, query blocks, key blocks), not 0 where a block of keys is looked at."""
    mask = mask_id.bool()
    mask = mask.repeat_interleave(q.shape[2] // mask.shape[2], 2).repeat_interleave(k.shape[2] // mask.shape[3], 3)
    return attend(q, k, v, tensor_layout, mask=mask)
