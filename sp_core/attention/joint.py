"""Joint attention: one softmax over text and video, the text whole on every rank.

Only the video travels. Each rank cuts the text's q, k and v to the heads that the exchange
gave it, attends over [text | video], sends the video's rows home and gathers the text's few
rows over the heads, so that the text goes on whole, with the same bits everywhere.

Shape legend: B batch, N text tokens (whole everywhere), t this rank's video tokens, T all,
H all heads, h this rank's heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.transport import Transport
from ..layout import shard_range, shard_sizes
from .masks import as_BHqk, cut_axis
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
    text_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """(q, k, v) of both to (video out (B, t, H, Dv), text out (B, N, H, Dv)).

    Three collectives: the video's exchange in and out, and a gather of the text's rows.

    Args:
        video_BtHD: q, k, v of this rank's video tokens.
        text_BNHD: q, k, v of the text, all heads, on every rank.
        token_counts: video tokens of each rank.
        attend: local attention over this rank's heads of all tokens, with the mask as fourth
            argument where there is one; not called on a rank without heads.
        mask: whole, over text and video in the order that ``text_first`` says, the video in
            rank order (:mod:`sp_core.attention.masks`).
        text_first: [text | video], as the model orders them, else [video | text].

    Raises:
        ValueError: shapes do not fit, as :func:`ulysses_attention`; text and video differ in heads.
    """
    q_text, k_text, v_text = text_BNHD
    N, H, T = q_text.size(1), q_text.size(2), sum(token_counts)
    if video_BtHD[0].size(2) != H:
        raise ValueError(f"the text has {H} heads, the video {video_BtHD[0].size(2)}")
    start, stop = shard_range(H, transport.world_size, transport.rank)
    mine = [x[:, :, start:stop] for x in (q_text, k_text, v_text)]
    text_rows, video_rows = (slice(0, N), slice(N, N + T)) if text_first else (slice(T, T + N), slice(0, T))
    # a rank without heads adds nothing to the text
    text_out_BNhD = v_text.new_empty(q_text.size(0), N, stop - start, v_text.size(3))
    if mask is not None:
        mask = cut_axis(as_BHqk(mask), 1, start, stop - start)

    def over_both(q_BThD: Tensor, k_BThD: Tensor, v_BThD: Tensor) -> Tensor:
        nonlocal text_out_BNhD
        pairs = zip(mine, (q_BThD, k_BThD, v_BThD), strict=True)
        both = [torch.cat(pair if text_first else pair[::-1], dim=1) for pair in pairs]
        out = attend(*both) if mask is None else attend(*both, mask)
        text_out_BNhD = out[:, text_rows]
        return out[:, video_rows]

    out_BtHD = ulysses_attention(*video_BtHD, transport, token_counts, over_both)
    return out_BtHD, _gather_by_heads(text_out_BNhD, H, transport)


def _gather_by_heads(out_BNhD: Tensor, num_heads: int, transport: Transport) -> Tensor:
    """All heads on every rank. Heads go first, as a gather joins dim 1: (B, h, N, D) to (B, H, N, D)."""
    out_BhND = out_BNhD.transpose(1, 2).contiguous()
    return transport.all_gather_tokens(out_BhND, shard_sizes(num_heads, transport.world_size)).transpose(1, 2)
