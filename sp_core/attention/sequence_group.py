"""One sequence on a group of ranks: Ulysses, or Ulysses in rows and a ring across them.

The choice is made here once, so a caller that has tokens to attend to need not know it.

Shape legend: B batch, t this rank's tokens, T all tokens, H all heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..comm.lane import Lane
from ..comm.ring_shift import Ring
from ..comm.transport import Transport, TransportStats
from ..layout import Shares, Weights
from .head_groups import Overlap
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
    #: where exchanges can run beside attention, if there is such a place
    lane: Lane | None = None
    #: into how many groups the heads of an attention go then
    groups: int = 1
    #: of all its ranks; None where all get the same
    shares: Shares | None = None

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

    def in_groups(self, groups: int) -> SequenceGroup:
        """The same ranks, whose attentions exchange by so many groups of heads; with 1 as a whole."""
        return self if groups == self.groups else replace(self, groups=groups)

    @property
    def token_share(self) -> float:
        """About which part of the tokens this rank has."""
        return 1 / self.world_size if self.shares is None else self.shares.tokens[self.rank] / sum(self.shares.tokens)

    @property
    def token_weights(self) -> Weights | None:
        """Of all ranks, by which the sequence is shared out; None: equally."""
        return None if self.shares is None else self.shares.tokens

    @property
    def head_weights(self) -> Weights | None:
        """Of the ranks of a Ulysses row, by which heads are shared out; None: equally."""
        return None if self.shares is None else self.shares.of_columns(1 if self.ring is None else self.ring.world_size)

    @property
    def overlap(self) -> Overlap | None:
        """None with a ring: it passes keys and values on while it attends, and that counts into the same statistics.

        None with shares too: unequal heads go in one exchange.
        """
        alone = self.groups == 1 or self.ring is not None or self.shares is not None
        return None if self.lane is None or alone else Overlap(self.lane, self.groups)

    def check(self) -> None:
        """Wait for the exchanges of this forward, and raise what went wrong in them. To be called at the end of a forward."""
        if self.lane is not None:
            self.lane.settle()
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
            return ulysses_attention(
                q_BtHD, k_BtHD, v_BtHD, self.ulysses, token_counts, attend, mask=mask, overlap=self.overlap, weights=self.head_weights
            )
        return usp_attention(
            q_BtHD,
            k_BtHD,
            v_BtHD,
            self.ulysses,
            self.ring,
            token_counts,
            attend=attention_with_lse,
            mask=mask,
            scale=scale,
            weights=self.head_weights,
        )
