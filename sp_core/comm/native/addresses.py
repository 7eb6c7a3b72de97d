"""Where every byte of a head exchange goes: the same arithmetic as in ``csrc/all2all_addresses.h``, on whole exchanges.

Shape legend: B batch, T all tokens, t one rank's tokens, H all heads, h one rank's heads. A head
is ``head_bytes`` bytes (D times the element size): element types do not matter to data movement.
A rank receives its output tensors in one *slot*, one after the other, each starting at a multiple
of :data:`ALIGN` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ...layout.sharding import shard_offsets, shard_sizes

#: ranks that one exchange can join
MAX_WORLD = 16
#: bytes; where tensors may start in a slot
ALIGN = 256


class ExchangeKind(IntEnum):
    SCATTER_HEADS = 0  #: (B, t, H, D) on every rank becomes (B, T, h, D)
    GATHER_HEADS = 1  #: (B, T, h, D) becomes (B, t, H, D)
    ALL_GATHER = 2  #: (B, t, H, D) becomes (B, T, H, D) on every rank


@dataclass(frozen=True)
class Copy:
    """All that one rank sends to another for one tensor: batch x tokens runs of ``run_bytes`` contiguous bytes.

    ``source`` and ``target`` are offsets in the sender's tensor and in the receiver's slot, the others byte strides.
    """

    batch: int
    tokens: int
    run_bytes: int
    source: int
    source_batch: int
    source_token: int
    target: int
    target_batch: int
    target_token: int


@dataclass(frozen=True)
class Exchange:
    """What every rank knows without asking another one.

    ``token_counts[r]`` is rank r's t, ``head_counts[r]`` its h; without head counts they are ``shard_sizes(heads, world_size)``.
    """

    kind: ExchangeKind
    tensors: int
    batch: int
    heads: int
    head_bytes: int
    token_counts: tuple[int, ...]
    head_counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.head_counts:  # so that exchanges that mean the same are equal
            object.__setattr__(self, "head_counts", shard_sizes(self.heads, self.world_size))

    @property
    def world_size(self) -> int:
        return len(self.token_counts)

    @property
    def tokens(self) -> int:
        return sum(self.token_counts)

    def heads_of(self, rank: int) -> int:
        return self.head_counts[rank]

    def output_rows(self, rank: int) -> tuple[int, int]:
        """(tokens, heads) of one output tensor of ``rank``."""
        tokens = self.token_counts[rank] if self.kind is ExchangeKind.GATHER_HEADS else self.tokens
        return tokens, self.heads_of(rank) if self.kind is ExchangeKind.SCATTER_HEADS else self.heads

    def output_bytes(self, rank: int) -> int:
        tokens, heads = self.output_rows(rank)
        return self.batch * tokens * heads * self.head_bytes

    def tensor_stride(self, rank: int) -> int:
        """Bytes from one tensor to the next in the slot of ``rank``."""
        return -(-self.output_bytes(rank) // ALIGN) * ALIGN

    def slot_bytes(self, rank: int) -> int:
        return self.tensors * self.tensor_stride(rank)

    def copy_between(self, source: int, target: int, tensor: int, source_batch: int, source_token: int) -> Copy:
        """The runs from rank ``source`` to rank ``target``.

        ``source_batch`` and ``source_token`` are the byte strides of the sender's tensor, whose heads
        lie contiguous inside a token.
        """
        token_starts = shard_offsets(self.token_counts)
        head_starts = shard_offsets(self.head_counts)
        slot = tensor * self.tensor_stride(target)
        tokens, heads = self.output_rows(target)
        target_token = heads * self.head_bytes
        if self.kind is ExchangeKind.GATHER_HEADS:
            return Copy(
                batch=self.batch,
                tokens=self.token_counts[target],
                run_bytes=self.heads_of(source) * self.head_bytes,
                source=token_starts[target] * source_token,
                source_batch=source_batch,
                source_token=source_token,
                target=slot + head_starts[source] * self.head_bytes,
                target_batch=tokens * target_token,
                target_token=target_token,
            )
        return Copy(
            batch=self.batch,
            tokens=self.token_counts[source],
            run_bytes=target_token,
            source=head_starts[target] * self.head_bytes if self.kind is ExchangeKind.SCATTER_HEADS else 0,
            source_batch=source_batch,
            source_token=source_token,
            target=slot + token_starts[source] * target_token,
            target_batch=tokens * target_token,
            target_token=target_token,
        )
