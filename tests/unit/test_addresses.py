"""The index arithmetic of an exchange against its meaning. tests/processes/test_address_header.py compares the C++ header with it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from generated_exchanges import contiguous_strides, generated_exchange, source_rows
from oracles.addresses import block_share, place_of, row_at

from sp_core.comm.native.addresses import Exchange, ExchangeKind
from sp_core.comm.transports.peer import block_count
from sp_core.layout import shard_sizes


def heads_delivered(exchange: Exchange, source: int, target: int, tensor: int) -> Iterator[tuple[int, int]]:
    """(source offset, slot offset) of every head that the copy of the reference moves."""
    copy = exchange.copy_between(source, target, tensor, *contiguous_strides(exchange, source))
    for row in range(copy.batch * copy.tokens):
        at_source, at_target = row_at(copy, row)
        for byte in range(0, copy.run_bytes, exchange.head_bytes):
            yield at_source + byte, at_target + byte


@pytest.mark.parametrize("seed", range(40))
def test_reference_puts_every_head_where_the_exchange_means_it_to_be(seed: int) -> None:
    exchange = generated_exchange(random.Random(seed), large=False)
    for target in range(exchange.world_size):
        filled: set[int] = set()
        for source in range(exchange.world_size):
            tokens, heads = source_rows(exchange, source)
            batch_stride, token_stride = contiguous_strides(exchange, source)
            for tensor in range(exchange.tensors):
                delivered = dict(heads_delivered(exchange, source, target, tensor))
                meant = {}
                for b in range(exchange.batch):
                    for token in range(tokens):
                        for head in range(heads):
                            rank, offset = place_of(exchange, source, target, tensor, b, token, head)
                            if rank == target:
                                meant[b * batch_stride + token * token_stride + head * exchange.head_bytes] = offset
                assert delivered == meant
                assert filled.isdisjoint(delivered.values())
                filled.update(delivered.values())
        assert len(filled) * exchange.head_bytes == exchange.tensors * exchange.output_bytes(target)
        assert max(filled, default=0) <= exchange.slot_bytes(target)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("blocks", [16, 17, 132, 264])
def test_blocks_serve_every_rank_and_differ_by_one_at_most(blocks: int, world_size: int) -> None:
    for rank in range(world_size):
        shares = [block_share(block, blocks, world_size, rank) for block in range(blocks)]
        assert len(set(shares)) == blocks
        counts = {peer: count for peer, _, count in shares}
        assert set(counts) == set(range(world_size))
        assert all(index < count == counts[peer] for peer, index, count in shares)
        assert sum(counts.values()) == blocks
        assert max(counts.values()) - min(counts.values()) <= 1


def test_132_blocks_on_8_ranks_are_17_and_16() -> None:
    assert sorted({count for _, _, count in (block_share(block, 132, 8, 0) for block in range(132))}) == [16, 17]


@pytest.mark.parametrize(
    ("tokens", "world_size", "processors", "blocks"),
    [
        (1, 4, 132, 4),  # tiny: one block a peer
        (0, 16, 132, 16),
        (512, 4, 132, 96),  # 64 kB a block: 512 tokens of 3 x 16 heads of 256 bytes
        (32_768, 8, 132, 264),  # large: two a multiprocessor of the smallest GPU
        (32_768, 8, 108, 216),
        (32_768, 2, 400, 512),
    ],
)
def test_block_count_follows_from_what_all_ranks_know(tokens: int, world_size: int, processors: int, blocks: int) -> None:
    exchange = Exchange(ExchangeKind.SCATTER_HEADS, 3, 1, 64, 256, shard_sizes(tokens, world_size))
    assert block_count(exchange, processors) == blocks
