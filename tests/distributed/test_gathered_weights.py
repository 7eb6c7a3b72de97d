"""Weights that lie once over real ranks: the bits of whole weights, by every kind of link, and nothing gathered twice."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import HANGS_S, parameters
from cxx import compiler
from distributed.peer_on_cpu import built_kernel, row_on_cpu
from distributed.ranks import RankPools, run_ranks
from torch import Tensor, nn

from sp_core.comm import Transport
from sp_core.comm.choice import make_transport
from sp_core.comm.lane import ThreadLane
from sp_core.comm.registry import TRANSPORTS, WITHOUT_BUFFERS, TransportRow, make_peer
from sp_core.comm.transports.collective import CollectiveTransport
from sp_core.comm.transports.slow import SlowTransport
from sp_core.parallel.groups import ParallelGroupsCache
from sp_core.plans.engine import Engine
from sp_core.reference.model import AudioVideoDiT, ReferenceConfig
from sp_core.reference.plan import REFERENCE
from sp_core.reference.sample import Inputs, step_arguments
from sp_core.weights import SharedWeights
from sp_core.weights.block import BlockShard, Place, WrongWeights, places_of
from sp_core.weights.tensors import take_apart

CONFIG = ReferenceConfig(layers=3)


def shared(model: nn.Module, rank: int, world_size: int) -> SharedWeights:
    shards = []
    for number, block in enumerate(REFERENCE.blocks_of(model)):
        weights: dict[int, tuple[list[Place], Any]] = {}
        for place in places_of(block):
            weights.setdefault(id(place.weight), ([], take_apart(place.weight)))[0].append(place)
        shards.append(BlockShard(number, weights.values(), rank, world_size, torch.device("cpu")))
    return SharedWeights(shards, world_size)


def emptied(model: nn.Module) -> None:
    """A block that computes with its own weights is noticed."""
    for block in REFERENCE.blocks_of(model):
        for weight in block.parameters():
            weight.data = torch.full_like(weight, math.nan)


def forward(model: nn.Module, weights: Any = None) -> tuple[Tensor, Tensor]:
    inputs = Inputs.seeded(CONFIG, 1, 3, 10, 14)
    engine = Engine(REFERENCE, CollectiveTransport(), weights=weights)
    with torch.inference_mode(), engine.installed(model) as state:
        output = model(**step_arguments(inputs, inputs.video, inputs.audio, 0.5), transformer_options={})
        state.check()
    return output


def both_ways(rank: int, world_size: int, slow: bool) -> tuple[bool, int, int]:
    model = AudioVideoDiT.seeded(CONFIG, 0)
    whole = forward(model)
    weights = shared(model, rank, world_size)
    emptied(model)
    inner = CollectiveTransport(torch.distributed.new_group())
    transport = SlowTransport(inner, math.inf, 0.001) if slow else inner
    lane = ThreadLane() if slow else None
    same = True
    for _ in range(2):
        transport.stats.reset()
        with weights.gathering(transport, lane) as gathering:
            same &= all(torch.equal(a, b) for a, b in zip(forward(model, gathering), whole, strict=True))
    return same, transport.stats.bytes_sent, weights.gathered_bytes


@pytest.mark.parametrize(("world_size", "slow"), parameters(plain=[(2, True), (3, False)], campaign=[(4, True)]))
def test_the_bits_are_those_of_whole_weights_and_the_bytes_those_of_the_formula(ranks: RankPools, world_size: int, slow: bool) -> None:
    for same, sent, expected in ranks.call(world_size, both_ways, slow):
        assert same
        assert sent == expected > 0


def by_the_peer_exchange(rank: int, world_size: int, library: str, directory: str) -> tuple[str, bool, int, int, list[str]]:
    """Two forwards with weights that the peer exchange gathers as nothing else can, and what gathers them where gloo works too."""
    broken = [replace(row, needs=(lambda facts: "out of order",)) for row in WITHOUT_BUFFERS if row.make is not make_peer]
    [peer] = [row_on_cpu(row, library, directory) for row in WITHOUT_BUFFERS if row.make is make_peer]

    def groups(*rows: TransportRow) -> ParallelGroupsCache:
        def make(group: Any) -> Transport:
            return make_transport(group, "cpu", directory=directory, timeout_s=60.0, rows=rows)[0]

        return ParallelGroupsCache(make, timedelta(seconds=60))

    names = []
    for others in ([row for row in TRANSPORTS if row.name == "gloo"], broken):
        cache = groups(*others, peer)
        group = cache.for_weights(world_size)
        assert group is not None and group.lane is None
        names.append(group.transport.name)
    model = AudioVideoDiT.seeded(CONFIG, 0)
    whole = forward(model)
    weights = shared(model, rank, world_size)
    emptied(model)
    same = True
    for _ in range(2):
        group.transport.stats.reset()
        with weights.gathering(group.transport, group.lane) as gathering:
            same &= all(torch.equal(mine, theirs) for mine, theirs in zip(forward(model, gathering), whole, strict=True))
    sent = group.transport.stats.bytes_sent
    cache.close()
    return group.transport.name, same, sent, weights.gathered_bytes, names


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_the_peer_exchange_gathers_them_where_no_stock_collective_works(tmp_path: Path) -> None:
    for name, same, sent, expected, names in run_ranks(2, by_the_peer_exchange, built_kernel(tmp_path), str(tmp_path)):
        assert names == ["gloo", "peer"] and name == "peer"
        assert same
        assert sent == expected > 0


def with_another_lora(rank: int, world_size: int) -> str:
    model = AudioVideoDiT.seeded(CONFIG, 0)
    if rank == 1:
        for weight in model.parameters():
            weight.data = weight.data * 1.01
    weights = shared(model, rank, world_size)
    try:
        with weights.gathering(CollectiveTransport(torch.distributed.new_group()), None) as gathering:
            gathering.enter(0)
    except WrongWeights as error:
        return str(error)
    return ""


def test_a_rank_with_other_weights_is_noticed_by_all() -> None:
    assert all("other weights of block 0" in said for said in run_ranks(2, with_another_lora))


# -- a gather beside the block before


def gathered_beside(rank: int, world_size: int, ahead: bool) -> list[bool]:
    """Of eight blocks, whether the gather for the next one had begun while one computed, which waited for it where it is to come ahead."""
    blocks = [nn.Linear(64, 64) for _ in range(8)]
    shards = [
        BlockShard(i, [([place], take_apart(place.weight)) for place in places_of(block)], rank, world_size, torch.device("cpu"))
        for i, block in enumerate(blocks)
    ]
    begun, computing = ([threading.Event() for _ in blocks] for _ in range(2))

    class Told(CollectiveTransport):
        gathers = 0

        def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
            number, self.gathers = self.gathers, self.gathers + 1
            begun[number].set()
            if ahead and number:
                assert computing[number - 1].wait(HANGS_S), "the block before had to wait for its own weights"
            return super()._all_gather_tokens(tensor_Bt, token_counts)

    found = []
    with SharedWeights(shards, world_size).gathering(Told(torch.distributed.new_group()), ThreadLane() if ahead else None) as gathering:
        for index in range(len(blocks)):
            gathering.enter(index)
            computing[index].set()
            if index + 1 < len(blocks):
                found.append(begun[index + 1].wait(HANGS_S) if ahead else begun[index + 1].is_set())
            gathering.leave(index)
            if ahead and not all(found):
                break
    return found


@pytest.mark.parametrize("ahead", [True, False])
def test_a_gather_runs_beside_the_block_before(ranks: RankPools, ahead: bool) -> None:
    """What that saves on a slow link, ``bench weights`` shows."""
    assert ranks.call(2, gathered_beside, ahead) == [[ahead] * 7] * 2
