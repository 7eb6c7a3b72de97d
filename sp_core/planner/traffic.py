"""Bytes that one rank sends, as a pure function of shapes: what the transports must count.

Exact for any token and head counts; summed over blocks these are the figures that
the planner divides by a link's rate. Where everything divides, an exchange of q, k, v and
back is ``4 * (S * d * b / N) * (N - 1) / N`` bytes a layer, the formula of DeepSpeed-Ulysses.

Shape legend: B batch, T all tokens, t this rank's tokens, H all heads, h this rank's heads,
D head_dim. ``itemsize`` is bytes an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layout.sequence import SequenceLayout
from ..layout.sharding import shard_sizes


@dataclass(frozen=True)
class CrossAttention:
    """A small replicated query against sharded keys: video-to-audio."""

    queries: int
    heads: int
    head_dim: int
    #: merge partial results instead of moving keys
    partial: bool = True


@dataclass(frozen=True)
class ForwardShape:
    """What one forward of a model sends: one self-attention a block, one gather of the output."""

    blocks: int
    heads: int
    head_dim: int
    #: channels of the tensor that is gathered at the end
    out_channels: int
    batch: int = 1
    itemsize: int = 2
    out_itemsize: int = 2
    #: once a block, if the model has it
    cross: CrossAttention | None = None


def forward_bytes(shape: ForwardShape, layout: SequenceLayout, rank: int, ring: int = 1) -> int:
    """Bytes that ``rank`` sends in one forward on a mesh of ``ring`` x (world / ring) ranks.

    Raises:
        ValueError: ``ring`` does not divide the world; no such rank.
    """
    counts = layout.counts
    if ring < 1 or len(counts) % ring:
        raise ValueError(f"a ring of {ring} does not divide a world of {len(counts)} ranks")
    if not 0 <= rank < len(counts):
        raise ValueError(f"rank {rank} is outside a world of {len(counts)}")
    element = shape.batch * shape.itemsize
    block = attention_bytes(counts, rank, ring, shape.heads, shape.head_dim * element)
    if shape.cross is not None:
        block += cross_bytes(shape.cross, counts, rank, element, shape.batch)
    return shape.blocks * block + gather_bytes(counts, shape.batch * shape.out_channels * shape.out_itemsize)


def attention_bytes(counts: Sequence[int], rank: int, ring: int, heads: int, head_bytes: int) -> int:
    """Self-attention on ring x Ulysses; ``head_bytes``: one head of one token, all batch items.

    The rank's Ulysses row exchanges q, k, v and the result; the ring passes k and v of
    this rank's heads.
    """
    width = len(counts) // ring
    rows = [counts[start : start + width] for start in range(0, len(counts), width)]
    place, column = divmod(rank, width)
    row, h = rows[place], shard_sizes(heads, width)[column]
    sent = 3 * scatter_bytes(row, column, heads, head_bytes)
    sent += h * (sum(row) - row[column]) * head_bytes  # the result back: my heads of others' tokens
    if h and ring > 1:
        # over ring - 1 hops every block passes through me but the one that starts at the next rank
        sent += 2 * h * (sum(counts) - sum(rows[(place + 1) % ring])) * head_bytes
    return sent


def scatter_bytes(counts: Sequence[int], rank: int, heads: int, head_bytes: int) -> int:
    """One tensor from token shards to head shards: my tokens of others' heads."""
    return counts[rank] * (heads - shard_sizes(heads, len(counts))[rank]) * head_bytes


def gather_bytes(counts: Sequence[int], token_bytes: int) -> int:
    """All-gather of uneven shards, padded to the longest."""
    return max(counts) * token_bytes * (len(counts) - 1)


def cross_bytes(cross: CrossAttention, counts: Sequence[int], rank: int, element: int, batch: int) -> int:
    """One :class:`CrossAttention`; ``element`` = batch * itemsize."""
    world_size = len(counts)
    head_bytes = cross.head_dim * element
    gathered = gather_bytes(shard_sizes(cross.heads, world_size), cross.queries * head_bytes)
    if not cross.partial:
        return 2 * scatter_bytes(counts, rank, cross.heads, head_bytes) + gathered
    # every query's partial output, and its log-sum-exp in fp32
    return scatter_bytes([cross.queries] * world_size, rank, cross.heads, head_bytes + 4 * batch) + gathered
