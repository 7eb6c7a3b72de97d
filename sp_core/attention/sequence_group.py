"""One sequence on a group of ranks: Ulysses, or Ulysses in rows and a ring across them.

The choice is made here once, so a caller that has tokens to attend to need not know it.

Shape legend: B batch, t this rank's tokens, T all tokens, H all heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..comm.ring_shift import Ring
from ..comm.transport import Transport, TransportStats
from .local import attention_with_lse
from .ring import usp_attention
from .ulysses import Attend, ulysses_attention


@dataclass(frozen=True)
class SequenceGroup:
    """The transports of one rank's sequence group.

    ``all_ranks`` joins all its ranks, in the order of the layout's ranks (ring-major);
    ``ulysses`` joins this rank's row, and is ``all_ranks`` where there is no ring.
    """

    all_ranks: Transport
    ulysses: Transport
    ring: Ring | None = None

    @classmethod
    def flat(cls, transport: Transport) -> SequenceGroup:
        """Ulysses over all ranks of one transport."""
        return cls(transport, transport)

    @property
    def rank(self) -> int:
        return self.all_ranks.rank

    @property
    def world_size(self) -> int:
        return self.all_ranks.world_size

    @property
    def stats(self) -> TransportStats:
        """What its transports sent. :mod:`sp_core.parallel.groups` lets all of a rank count into one object, that of the CFG halves too."""
        return self.all_ranks.stats

    def check(self) -> None:
        """Wait for the exchanges of this forward, and raise what went wrong in them. To be called at the end of a forward."""
        self.all_ranks.check()
        if self.ulysses is not self.all_ranks:
            self.ulysses.check()

    def attention(
        self,
        q_BtHD: Tensor,
        k_BtHD: Tensor,
        v_BtHD: Tensor,
        token_counts: Sequence[int],
        attend: Attend,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Self-attention over the tokens of all ranks: (B, t, H, D) in, (B, t, H, Dv) out.

        Args:
            token_counts: tokens of each rank of the group.
            attend: the local attention of a group without a ring. A ring needs log-sum-exp and
                uses torch's own kernels.
            mask: of all T tokens, in rank order.
            scale: of the ring's attention; ``attend`` knows its own.
        """
        if self.ring is None:
            return ulysses_attention(q_BtHD, k_BtHD, v_BtHD, self.ulysses, token_counts, attend, mask=mask)
        return usp_attention(
            q_BtHD, k_BtHD, v_BtHD, self.ulysses, self.ring, token_counts, attend=attention_with_lse, mask=mask, scale=scale
        )
