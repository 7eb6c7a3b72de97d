"""Random exchanges for tests of the index arithmetic, and the tensors that their ranks bring."""

from __future__ import annotations

import random
from itertools import pairwise

from sp_core.comm.native.addresses import MAX_WORLD, Exchange, ExchangeKind


def generated_exchange(random: random.Random, large: bool) -> Exchange:
    world_size = random.randint(1, MAX_WORLD)
    # 200,000 tokens of 32 KB: each product of the arithmetic passes 2^31 by itself
    most = 200_000 if large else 7
    counts = tuple(random.choice((0, random.randint(0, most), most)) for _ in range(world_size))
    heads = random.randint(1, 64 if large else 9)
    # equal shares, or any others
    cuts = sorted(random.randint(0, heads) for _ in range(world_size - 1))
    owned = tuple(high - low for low, high in pairwise([0, *cuts, heads])) if random.random() < 0.5 else ()
    return Exchange(
        kind=random.choice(list(ExchangeKind)),
        tensors=random.randint(1, 4),
        batch=random.randint(1, 4 if large else 3),
        heads=heads,
        head_bytes=random.choice((2, 128, 256, 512) if large else (1, 2, 3, 6, 16, 40)),
        token_counts=counts,
        head_counts=owned,
    )


def source_rows(exchange: Exchange, rank: int) -> tuple[int, int]:
    """(tokens, heads) of a tensor that ``rank`` brings."""
    if exchange.kind is ExchangeKind.GATHER_HEADS:
        return exchange.tokens, exchange.heads_of(rank)
    return exchange.token_counts[rank], exchange.heads


def contiguous_strides(exchange: Exchange, rank: int) -> tuple[int, int]:
    tokens, heads = source_rows(exchange, rank)
    return tokens * heads * exchange.head_bytes, heads * exchange.head_bytes
