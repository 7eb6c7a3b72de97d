"""What the address arithmetic is checked against: places, rows, access widths and shares of blocks, told another way.

The header ``csrc/all2all_addresses.h`` and :mod:`sp_core.comm.native.addresses` must both agree with it.
"""

from __future__ import annotations

from math import gcd

from sp_core.comm.native.addresses import Copy, Exchange, ExchangeKind
from sp_core.layout import shard_offsets


def place_of(exchange: Exchange, source: int, target: int, tensor: int, b: int, token: int, head: int) -> tuple[int, int]:
    """(rank, byte offset in its slot) where one head of one token of ``source`` lands.

    Told from the meaning of the three kinds alone, element by element, so that it can check
    :meth:`Exchange.copy_between`. ``target`` only matters for an all-gather, which sends to everybody.
    """
    head_ranges = list(zip(shard_offsets(exchange.head_counts), exchange.head_counts, strict=True))
    token_ranges = list(zip(shard_offsets(exchange.token_counts), exchange.token_counts, strict=True))
    if exchange.kind is ExchangeKind.GATHER_HEADS:
        rank = next(r for r, (start, size) in enumerate(token_ranges) if start <= token < start + size)
        index = b, token - token_ranges[rank][0], head_ranges[source][0] + head
    elif exchange.kind is ExchangeKind.SCATTER_HEADS:
        rank = next(r for r, (start, size) in enumerate(head_ranges) if start <= head < start + size)
        index = b, token_ranges[source][0] + token, head - head_ranges[rank][0]
    else:
        rank, index = target, (b, token_ranges[source][0] + token, head)
    tokens, heads = exchange.output_rows(rank)
    at_batch, at_token, at_head = index
    return rank, tensor * exchange.tensor_stride(rank) + ((at_batch * tokens + at_token) * heads + at_head) * exchange.head_bytes


def row_at(copy: Copy, row: int) -> tuple[int, int]:
    """(source offset, target offset) of run number ``row`` of a copy."""
    b, token = divmod(row, copy.tokens)
    return (
        copy.source + b * copy.source_batch + token * copy.source_token,
        copy.target + b * copy.target_batch + token * copy.target_token,
    )


def vector_bytes(copy: Copy, source_address: int, target_address: int) -> int:
    """The widest access (1, 2, 4, 8 or 16 bytes) that every run of a copy allows."""
    values = [copy.run_bytes, source_address + copy.source, target_address + copy.target]
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
