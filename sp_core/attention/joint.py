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
from ..layout import Weights
from .head_groups import Overlap, head_groups, heads_of
from .masks import as_BHqk, narrow_mask
from .replicated_heads import all_gather_heads
from .ulysses import Attend, attention_of_heads

Triple = tuple[Tensor, Tensor, Tensor]


def joint_attention(
    video_BtHD: Triple,
    text_BNHD: Triple,
    transport: Transport,
    token_counts: Sequence[int],
    attend: Attend,
    *,
    mask: Tensor | None = None,
    overlap: Overlap | None = None,
    weights: Weights | None = None,
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
        weights: see :func:`ulysses_attention`.
        overlap: see :func:`ulysses_attention`; the video's exchange is then one for each group of heads.

    Raises:
        ValueError: shapes do not fit, as :func:`ulysses_attention`; text and video differ in heads.
    """
    q_text, _, v_text = text_BNHD
    N, H = q_text.size(1), q_text.size(2)
    if video_BtHD[0].size(2) != H:
        raise ValueError(f"the text has {H} heads, the video {video_BtHD[0].size(2)}")
    mask_BHqk = None if mask is None else as_BHqk(mask)
    texts_BNhD: list[Tensor] = []

    def over_both(heads: range, q_BThD: Tensor, k_BThD: Tensor, v_BThD: Tensor) -> Tensor:
        mine = [x[:, :, heads.start : heads.stop] for x in text_BNHD]
        pairs = zip(mine, (q_BThD, k_BThD, v_BThD), strict=True)
        both = [torch.cat(pair, dim=1) for pair in pairs]
        out = attend(*both) if mask_BHqk is None else attend(*both, narrow_mask(mask_BHqk, 1, heads.start, len(heads)))
        texts_BNhD.append(out[:, :N])
        return out[:, N:]

    out_BtHD = attention_of_heads(*video_BtHD, transport, token_counts, over_both, overlap=overlap, weights=weights)
    if not texts_BNhD:  # a rank without heads adds nothing to the text
        texts_BNhD = [v_text.new_empty(q_text.size(0), N, 0, v_text.size(3))]
    own_text_BNhD = texts_BNhD[0] if len(texts_BNhD) == 1 else torch.cat(texts_BNhD, dim=2)
    groups = head_groups(H, transport.world_size, 1 if overlap is None else overlap.groups, weights)
    return out_BtHD, _in_order(all_gather_heads(own_text_BNhD, H, transport, weights), groups, transport)


def _in_order(text_BNHD: Tensor, groups: Sequence[range], transport: Transport) -> Tensor:
    """Heads that come rank after rank, each rank's by group, in the order of the model."""
    if len(groups) == 1:
        return text_BNHD
    ranks = transport.world_size
    came = [head for rank in range(ranks) for group in groups for head in heads_of(group, ranks, rank)]
    places = torch.tensor(came).argsort().to(text_BNHD.device)
    return text_BNHD.index_select(2, places)
