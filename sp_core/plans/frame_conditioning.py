"""What LongCat-Video's plan asks of LongCat-Video's model, so that a type checker sees both ends.

Conditioning frames are clean first frames that attend to themselves alone. The model describes
them by an object that stands where attention has its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class FrameConditioning(Protocol):
    """Which tokens of a forward are conditioning frames."""

    def for_rank(self, own_t: Tensor, order_T: Tensor | None, tokens: int) -> FrameConditioning:
        """The same frames for a rank that owns the tokens ``own_t`` and whose attention sees all tokens in ``order_T``.

        Args:
            own_t: raster ids of the rank's tokens, int64 (t,).
            order_T: raster ids of all tokens in the order that attention sees, int64 (T,); None where that is raster order.
            tokens: how many tokens there are in all, T.
        """


class FrameAttention(Protocol):
    """A self-attention module that can attend by a :class:`FrameConditioning`."""

    #: (q, k, v, heads, conditioning, attn_precision, transformer_options) -> out, each (B, T, H * D) with all tokens
    attend_in_frames: Callable[..., Tensor]
