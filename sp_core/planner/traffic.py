"""Bytes that one rank sends, as pure functions of shapes: what the transports count, byte for byte.

Not in them: the join of the CFG halves' outputs, and the gather of a joint attention's text, which are small.

They hold for any token and head counts. The planner divides their sum over all blocks by a
link's rate. Where everything divides, an exchange of q, k and v and the way back of the result
send ``4 * (T * H * D * itemsize / N) * (N - 1) / N`` bytes in each layer on N ranks.

Source: DeepSpeed-Ulysses (arXiv 2309.14509) for that formula.

Shape legend: B batch, T all tokens, t this rank's tokens, H all heads, h this rank's heads,
D head_dim. ``itemsize`` is bytes for each element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layout.sequence import SequenceLayout
from ..layout.sharding import Weights, shard_sizes


@dataclass(frozen=True)
class CrossAttention:
    """A short query, equal on all ranks, that attends to sharded keys: audio to video's tokens."""

    queries: int
    heads: int
    head_dim: int
    #: partial results are merged; otherwise keys and values are exchanged
    partial: bool = True


@dataclass(frozen=True)
class ForwardShape:
    """What decides the bytes of one forward: a self-attention in each block, and one gather of the output."""

    blocks: int
    heads: int
    head_dim: int
    #: channels of the tensor that is gathered at the end
    out_channels: int
    batch: int = 1
    itemsize: int = 2
    out_itemsize: int = 2
    #: if the model has it, once in each block
    cross: CrossAttention | None = None


def forward_bytes(shape: ForwardShape, layout: SequenceLayout, rank: int, ring: int = 1, weights: Weights | None = None) -> int:
    """Bytes that ``rank`` sends in one forward on a mesh of ``ring`` x (world_size / ring) ranks.

    Args:
        weights: of the ranks of a row, by which the heads of self-attention are shared out; None: equally.

    Raises:
        ValueError: ``ring`` does not divide the world; no such rank.
    """
    counts = layout.counts
    if ring < 1 or len(counts) % ring:
        raise ValueError(f"a ring of {ring} does not divide a world of {len(counts)} ranks")
    if not 0 <= rank < len(counts):
        raise ValueError(f"rank {rank} is outside a world of {len(counts)}")
    element = shape.batch * shape.itemsize
    block = attention_bytes(counts, rank, ring, shape.heads, shape.head_dim * element, weights)
    if shape.cross is not None:
        block += cross_bytes(shape.cross, counts, rank, element, shape.batch)
    return shape.blocks * block + gather_bytes(counts, shape.batch * shape.out_channels * shape.out_itemsize)


def attention_bytes(counts: Sequence[int], rank: int, ring: int, heads: int, head_bytes: int, weights: Weights | None = None) -> int:
    """Bytes that ``rank`` sends in one self-attention on ring x Ulysses.

    The ranks of its row exchange q, k, v and the result. The ring passes on k and v of this rank's heads.

    Args:
        counts: tokens of each rank.
        heads: of the model, H.
        head_bytes: of one head of one token, for all batch rows.
        weights: of the ranks of a row, by which heads are shared out; None: equally.
    """
    width = len(counts) // ring
    rows = [counts[start : start + width] for start in range(0, len(counts), width)]
    place, column = divmod(rank, width)
    row, h = rows[place], shard_sizes(heads, width, weights)[column]
    sent = 3 * scatter_bytes(row, column, heads, head_bytes, weights)
    sent += h * (sum(row) - row[column]) * head_bytes  # the result goes back: this rank's heads of the others' tokens
    if h and ring > 1:
        # in ring - 1 hops, every block passes through this rank except the one that starts at the next rank
        sent += 2 * h * (sum(counts) - sum(rows[(place + 1) % ring])) * head_bytes
    return sent


def scatter_bytes(counts: Sequence[int], rank: int, heads: int, head_bytes: int, weights: Weights | None = None) -> int:
    """Bytes that ``rank`` sends of one tensor that goes from token shards to head shards: its tokens of the others' heads."""
    return counts[rank] * (heads - shard_sizes(heads, len(counts), weights)[rank]) * head_bytes


def gather_bytes(counts: Sequence[int], token_bytes: int) -> int:
    """Bytes that every rank sends in an all-gather of uneven shards, each padded to the longest."""
    return max(counts) * token_bytes * (len(counts) - 1)


def cross_bytes(cross: CrossAttention, counts: Sequence[int], rank: int, element: int, batch: int) -> int:
    """Bytes that ``rank`` sends in one :class:`CrossAttention`; ``element`` is batch * itemsize."""
    world_size = len(counts)
    head_bytes = cross.head_dim * element
    gathered = gather_bytes(shard_sizes(cross.heads, world_size), cross.queries * head_bytes)
    if not cross.partial:
        return 2 * scatter_bytes(counts, rank, cross.heads, head_bytes) + gathered
    # every query's partial output, and its log-sum-exp in fp32
    return scatter_bytes([cross.queries] * world_size, rank, cross.heads, head_bytes + 4 * batch) + gathered
