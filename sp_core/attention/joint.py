"""Joint attention: one softmax over text and video, where every rank holds the text in full.

Only the video is exchanged. Each rank takes the heads of the text's q, k and v that the exchange
gave it of the video's, and attends over [text | video]. It sends the video's rows back to their
owners. The text's few rows are gathered over the heads, so every rank goes on with the same bits.

Shape legend: B batch, N text tokens (replicated), t this rank's video tokens, T all video tokens,
H all heads, h this rank's heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.transport import Transport
from ..layout import shard_range
from .masks import as_BHqk, narrow_mask
from .replicated_heads import all_gather_heads
from .ulysses import Attend, ulysses_attention

Triple = tuple[Tensor, Tensor, Tensor]


def joint_attention(
    video_BtHD: Triple,
    text_BNHD: Triple,
    transport: Transport,
    token_counts: Sequence[int],
    attend: Attend,
    *,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(q, k, v) of both to (video out (B, t, H, Dv), text out (B, N, H, Dv)).

    Three collectives: the video's exchange in and out, and a gather of the text's rows.

    Args:
        video_BtHD: q, k, v of this rank's video tokens.
        text_BNHD: q, k, v of the text, all heads, on every rank.
        token_counts: video tokens of each rank.
        attend: local attention over this rank's heads of all tokens, with the mask as fourth
            argument where there is one; not called on a rank without heads.
        mask: of all N + T tokens, the text first and the video in rank order
            (:mod:`sp_core.attention.masks`).

    Raises:
        ValueError: shapes do not fit, as :func:`ulysses_attention`; text and video differ in heads.
    """
    q_text, k_text, v_text = text_BNHD
    N, H = q_text.size(1), q_text.size(2)
    if video_BtHD[0].size(2) != H:
        raise ValueError(f"the text has {H} heads, the video {video_BtHD[0].size(2)}")
    start, stop = shard_range(H, transport.world_size, transport.rank)
    mine = [x[:, :, start:stop] for x in (q_text, k_text, v_text)]
    # a rank without heads adds nothing to the text
    text_out_BNhD = v_text.new_empty(q_text.size(0), N, stop - start, v_text.size(3))
    if mask is not None:
        mask = narrow_mask(as_BHqk(mask), 1, start, stop - start)

    def over_both(q_BThD: Tensor, k_BThD: Tensor, v_BThD: Tensor) -> Tensor:
        nonlocal text_out_BNhD
        pairs = zip(mine, (q_BThD, k_BThD, v_BThD), strict=True)
        both = [torch.cat(pair, dim=1) for pair in pairs]
        out = attend(*both) if mask is None else attend(*both, mask)
        text_out_BNhD = out[:, :N]
        return out[:, N:]

    out_BtHD = ulysses_attention(*video_BtHD, transport, token_counts, over_both)
    return out_BtHD, all_gather_heads(text_out_BNhD, H, transport)
