"""Where every byte of a head exchange goes: the reference of ``csrc/all2all_layout.h``.

Shape legend: B batch, T all tokens, t one rank's tokens, H all heads, h one rank's heads. A head
is ``head_bytes`` bytes (D times the element size): element types do not matter to data movement.
A rank receives its output tensors in one *slot*, one after the other, each starting at a multiple
of :data:`ALIGN` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import gcd

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
    """All that one rank sends to another for one tensor: batch x tokens runs of contiguous bytes."""

    batch: int
    tokens: int
    run: int
    source: int
    source_batch: int
    source_token: int
    target: int
    target_batch: int
    target_token: int


@dataclass(frozen=True)
class Exchange:
    """What every rank knows without asking another one.

    ``token_counts[r]`` is rank r's t; rank r owns heads ``shard_sizes(heads, world_size)[r]``.
    """

    kind: ExchangeKind
    tensors: int
    batch: int
    heads: int
    head_bytes: int
    token_counts: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.token_counts)

    @property
    def tokens(self) -> int:
        return sum(self.token_counts)

    def heads_of(self, rank: int) -> int:
        return shard_sizes(self.heads, self.world_size)[rank]

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

    def sent_bytes(self, source: int, target: int) -> int:
        """Payload from one rank to another, all tensors together."""
        copy = self.copy_between(source, target, 0, 0, 0)
        return self.tensors * copy.batch * copy.tokens * copy.run

    def copy_between(self, source: int, target: int, tensor: int, source_batch: int, source_token: int) -> Copy:
        """The runs from rank ``source`` to rank ``target``.

        ``source_batch`` and ``source_token`` are the byte strides of the sender's tensor, whose heads
        lie contiguous inside a token.
        """
        token_starts = shard_offsets(self.token_counts)
        head_starts = shard_offsets(shard_sizes(self.heads, self.world_size))
        slot = tensor * self.tensor_stride(target)
        tokens, heads = self.output_rows(target)
        target_token = heads * self.head_bytes
        if self.kind is ExchangeKind.GATHER_HEADS:
            return Copy(
                batch=self.batch,
                tokens=self.token_counts[target],
                run=self.heads_of(source) * self.head_bytes,
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
            run=target_token,
            source=head_starts[target] * self.head_bytes if self.kind is ExchangeKind.SCATTER_HEADS else 0,
            source_batch=source_batch,
            source_token=source_token,
            target=slot + token_starts[source] * target_token,
            target_batch=tokens * target_token,
            target_token=target_token,
        )

    def place_of(self, source: int, target: int, tensor: int, b: int, token: int, head: int) -> tuple[int, int]:
        """(rank, byte offset in its slot) where one head of one token of ``source`` lands.

        Told from the meaning of the three kinds alone, element by element, so that it can check
        :meth:`copy_between`. ``target`` only matters for an all-gather, which sends to everybody.
        """
        head_counts = shard_sizes(self.heads, self.world_size)
        head_ranges = list(zip(shard_offsets(head_counts), head_counts, strict=True))
        token_ranges = list(zip(shard_offsets(self.token_counts), self.token_counts, strict=True))
        if self.kind is ExchangeKind.GATHER_HEADS:
            rank = next(r for r, (start, size) in enumerate(token_ranges) if start <= token < start + size)
            index = b, token - token_ranges[rank][0], head_ranges[source][0] + head
        elif self.kind is ExchangeKind.SCATTER_HEADS:
            rank = next(r for r, (start, size) in enumerate(head_ranges) if start <= head < start + size)
            index = b, token_ranges[source][0] + token, head - head_ranges[rank][0]
        else:
            rank, index = target, (b, token_ranges[source][0] + token, head)
        tokens, heads = self.output_rows(rank)
        at_batch, at_token, at_head = index
        return rank, tensor * self.tensor_stride(rank) + ((at_batch * tokens + at_token) * heads + at_head) * self.head_bytes


def row_at(copy: Copy, row: int) -> tuple[int, int]:
    """(source offset, target offset) of run number ``row`` of a copy."""
    b, token = divmod(row, copy.tokens)
    return (
        copy.source + b * copy.source_batch + token * copy.source_token,
        copy.target + b * copy.target_batch + token * copy.target_token,
    )


def vector_bytes(copy: Copy, source_address: int, target_address: int) -> int:
    """The widest access (1, 2, 4, 8 or 16 bytes) that every run of a copy allows."""
    values = [copy.run, source_address + copy.source, target_address + copy.target]
    values += [copy.source_token, copy.target_token] if copy.tokens > 1 else []
    values += [copy.source_batch, copy.target_batch] if copy.batch > 1 else []
    return gcd(16, *values)


def block_share(block: int, blocks: int, world_size: int, rank: int) -> tuple[int, int, int]:
    """(peer, index, count): block ``block`` is number ``index`` of the ``count`` blocks that serve ``peer``.

    Blocks rotate over destinations, starting behind the own rank so that no receiver is everybody's first.
    """
    served = [[b for b in range(blocks) if b % world_size == lane] for lane in range(world_size)]
    lane = block % world_size
    return (lane + rank + 1) % world_size, served[lane].index(block), len(served[lane])
