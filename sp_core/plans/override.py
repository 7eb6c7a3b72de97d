"""The attention that a marked call site gets: exchange, the user's own attention, exchange back.

It is installed as the host's ``optimized_attention_override`` for that one call, so it
sees whatever head count and mask the call has; the override that was there before (a
user's Sage or Flash patch) stays in charge of the local attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.joint import joint_attention
from ..attention.partial import exchanged_cross_attention, partial_cross_attention
from ..attention.sequence_group import SequenceGroup
from ..errors import SPError
from .forward_state import ForwardState

OVERRIDE = "optimized_attention_override"


@dataclass(frozen=True)
class HeldMask:
    """A mask that is no tensor, carried past the module to the override, with the attention that understands it."""

    mask: Any
    attention: Callable[..., Tensor]
    #: it speaks of positions in the model's own order, whatever order the layout brings the tokens in
    in_raster: bool = False


class ExchangedAttention:
    """``override(function, q, k, v, heads, ...)`` of one call site in one forward.

    Shapes follow the host: (B, t, H * D), or (B, H, t, D) with ``skip_reshape``.
    """

    def __init__(self, run: ForwardState, sequence: SequenceGroup, kind: str, options: Mapping[str, Any]) -> None:
        self.run, self.sequence, self.kind = run, sequence, kind
        # the call's options as they were: what runs inside must not exchange again
        self.options = dict(options)
        self.users = self.options.get(OVERRIDE)

    def __call__(
        self, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **kwargs: Any
    ) -> Tensor:
        self.run.attended += 1
        heads_first = kwargs.pop("skip_reshape", False)
        keep_heads_first = kwargs.pop("skip_output_reshape", False)
        q, k, v = (self._split(x, heads, heads_first) for x in (q, k, v))
        if kwargs.pop("enable_gqa", False) or k.size(2) != q.size(2):
            # grouped heads need not fall together with head shards
            k, v = (x.repeat_interleave(q.size(2) // x.size(2), dim=2) for x in (k, v))
        out_BtHD = self._exchanged(q, k, v, mask, kwargs.get("scale"), lambda *local: self._local(function, kwargs, *local))
        return out_BtHD.transpose(1, 2) if keep_heads_first else out_BtHD.flatten(2)

    def container_function(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Newer hosts hand tensors over in single-owner containers and look for this name."""
        function = kwargs.pop("function", None) or _host_attention()
        return self(function, q.take(), k.take(), v.take(), *args, **kwargs)

    def _exchanged(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, local: Callable[..., Tensor]) -> Tensor:
        counts = self.run.layout.counts
        if self.kind == "joint":
            return self._joint(q, k, v, mask, local)
        if self.kind == "from_stream":
            if self.users is None:
                return partial_cross_attention(q, k, v, self.sequence.all_ranks, counts, mask=self._ordered(mask), scale=scale)

            def users(
                q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Tensor | None = None, scale: float | None = None
            ) -> tuple[Tensor, Tensor]:
                return (local(q_BTHD, k_BTHD, v_BTHD, mask) if q_BTHD.size(2) else q_BTHD), q_BTHD

            # a user's attention returns no log-sum-exp, so the keys have to come to it
            return exchanged_cross_attention(q, k, v, self.sequence.all_ranks, counts, attend=users, mask=self._ordered(mask))
        if self.sequence.ring is not None and (self.users is not None or isinstance(mask, HeldMask)):
            what = (
                "a guide mask or conditioning frames" if isinstance(mask, HeldMask) else "an attention function that another node installed"
            )
            raise SPError(f"Ring attention cannot use {what}. Leave ring at 0 (automatic) or 1 in SP Model Patch")
        if isinstance(mask, HeldMask):
            held = mask

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                order = self.run.layout.order() if held.in_raster else None
                if order is None:
                    return local(q, k, v, held)
                q, k, v = (self.run.layout.restore(x, 1) for x in (q, k, v))
                return local(q, k, v, held).index_select(1, order.to(q.device))

            return self.sequence.attention(q, k, v, counts, attend)
        return self.sequence.attention(q, k, v, counts, local, mask=self._ordered(mask), scale=scale)

    def _joint(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, local: Callable[..., Tensor]) -> Tensor:
        """q, k and v are whole tokens, then this rank's: (B, N + t, H, D)."""
        if self.sequence.ring is not None:
            raise SPError(
                "Ring attention cannot serve this model: its text takes part in the attention and would come out different on each rank "
                "of the ring. Leave ring at 0 (automatic) or 1 in SP Model Patch"
            )
        n = self.run.whole_tokens
        own, whole = (q[:, n:], k[:, n:], v[:, n:]), (q[:, :n], k[:, :n], v[:, :n])
        out, out_whole = joint_attention(own, whole, self.sequence.all_ranks, self.run.layout.counts, local, mask=self._ordered(mask))
        return torch.cat([out_whole, out], dim=1)

    def _local(self, function: Callable[..., Tensor], kwargs: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        """Attention of this rank's heads over all tokens, by whoever is in charge of attention."""
        heads = q.size(2)
        flat = [x.flatten(2) for x in (q, k, v)]
        if isinstance(mask, HeldMask):
            out = mask.attention(*flat, heads, mask.mask, kwargs.get("attn_precision"), self.options)
        else:
            call = {**kwargs, "mask": mask, "transformer_options": self.options}
            out = function(*flat, heads, **call) if self.users is None else self.users(function, *flat, heads, **call)
        return self._split(out, heads, False)

    def _ordered(self, mask: Tensor | None) -> Tensor | None:
        """The mask in rank order: tiles bring the tokens in another order than the model's."""
        order = self.run.layout.order() if mask is not None else None
        if mask is None or order is None:
            return mask
        whole = self.run.whole_tokens if self.kind == "joint" else 0
        order = torch.cat([torch.arange(whole), order + whole]).to(mask.device)
        for dim in (-1,) if self.kind == "from_stream" else (-1, -2):
            if mask.size(dim) == order.numel():
                mask = mask.index_select(dim, order)
        return mask

    @staticmethod
    def _split(x: Tensor, heads: int, heads_first: bool) -> Tensor:
        """To (B, t, H, D)."""
        return x.transpose(1, 2) if heads_first else x.unflatten(2, (heads, -1))


def _host_attention() -> Callable[..., Tensor]:
    import sys

    return sys.modules["comfy.ldm.modules.attention"].optimized_attention  # type: ignore[no-any-return]


def mark(options: Mapping[str, Any], run: ForwardState, sequence: SequenceGroup, kind: str) -> dict[str, Any]:
    """Options for one attention call that shall exchange."""
    return {**options, OVERRIDE: ExchangedAttention(run, sequence, kind, options)}
