"""Weights as bytes: tensors of any kind taken apart and made again, and what a gather puts into a block."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_core.comm.lane import ThreadLane
from sp_core.comm.registry import WITHOUT_BUFFERS
from sp_core.comm.transport import Transport
from sp_core.weights import SharedWeights, gathered_bytes, shard_bytes
from sp_core.weights.block import BlockShard, Place, WrongWeights, places_of
from sp_core.weights.layout import ALIGNMENT, WORD, offsets, sample_places
from sp_core.weights.tensors import NotShareable, take_apart


class Packed(Tensor):
    """A tensor that can be flattened, as ComfyUI's quantised ones: numbers of one byte, and a scale."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Packed:
        made = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)
        made.numbers, made.scale = numbers, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["numbers", "scale"], "context"

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: str, size: Any, stride: Any) -> Packed:
        assert context == "context"
        return Packed(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


class GGMLTensor(Tensor):
    """As ComfyUI-GGUF's: bytes of a plain tensor, and attributes."""

    tensor_type: int


class Unknown(Tensor):
    pass


def ggml() -> Tensor:
    made = torch.arange(34, dtype=torch.uint8).as_subclass(GGMLTensor)
    made.tensor_type = 8  # type: ignore[attr-defined]
    return made


TENSORS: dict[str, Tensor] = {
    "fp32": nn.Parameter(torch.randn(3, 5), requires_grad=False),
    "bf16": nn.Parameter(torch.randn(7).bfloat16(), requires_grad=False),
    "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "transposed": torch.randn(3, 5).t(),
    "every second": torch.randn(8)[::2],
    "number": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_plain_tensor_is_its_own_only_part(kind: str) -> None:
    tensor = TENSORS[kind]
    apart = take_apart(tensor)
    again = apart.rebuild([part.clone() for part in apart.parts])
    assert type(again) is type(tensor) and again.dtype == tensor.dtype
    assert torch.equal(again.float(), tensor.float())


def test_a_tensor_that_can_be_flattened_is_its_parts() -> None:
    packed = nn.Parameter(Packed(torch.arange(6, dtype=torch.int8), torch.tensor(0.5)), requires_grad=False)
    apart = take_apart(packed)
    assert [part.dtype for part in apart.parts] == [torch.int8, torch.float32]
    again = apart.rebuild([part + 1 for part in apart.parts])
    assert isinstance(again, Packed) and isinstance(again, nn.Parameter)
    assert again.numbers.tolist() == [1, 2, 3, 4, 5, 6] and again.scale == 1.5


def test_a_known_subclass_keeps_its_attributes() -> None:
    again = take_apart(ggml()).rebuild([torch.zeros(34, dtype=torch.uint8)])
    assert type(again) is GGMLTensor and again.tensor_type == 8


def test_an_unknown_subclass_is_named() -> None:
    with pytest.raises(NotShareable, match=r"Unknowns of .*test_shared_weights"):
        take_apart(torch.zeros(3).as_subclass(Unknown))


# -- layout


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("block", [0, 1, 64, 100, 1000, 123_456])
def test_shards_hold_the_block_and_little_more(block: int, ranks: int) -> None:
    shard = shard_bytes(block, ranks)
    assert shard % ALIGNMENT == 0 and block <= shard * ranks < block + ranks * ALIGNMENT
    assert gathered_bytes([block, block], ranks) == 2 * (ranks - 1) * shard
    places = sample_places(block, ranks)
    assert all(WORD * place + WORD <= block for place in places)
    if block > ranks * 1000:
        assert {WORD * place // shard for place in places} == set(range(ranks)), "a shard is never looked at"


def test_tensors_in_a_block_begin_aligned() -> None:
    assert offsets([1, 64, 65, 0, 4]) == ([0, 64, 128, 256, 256], 320)


# -- a model's blocks over ranks that are all in this process


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 16).bfloat16()
        self.tied = nn.Linear(16, 24, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).bfloat16()).float() * self.scale.sum() + self.tied(x).sum()


class Loopback(Transport):
    """Stands for a link: each gather joins what the ranks of this process hold at that moment."""

    name, beside = "loopback", True

    def __init__(self, rank: int, world: list[SharedWeights]) -> None:
        super().__init__(rank, len(world))
        self.world = world
        self.gathers: list[int] = []

    def _all_gather_tokens(self, tensor_Bt: Tensor, token_counts: Sequence[int]) -> Tensor:
        mine = self.world[self.rank].shards
        block = next(index for index, shard in enumerate(mine) if shard.shard.data_ptr() == tensor_Bt.data_ptr())
        self.gathers.append(block)
        return torch.cat([weights.shards[block].shard.view(1, -1, WORD) for weights in self.world], 1)

    def _scatter_heads(self, *_: Any) -> Any:
        raise AssertionError

    _gather_heads = _scatter_heads


def shared(blocks: list[Block], ranks: int) -> list[SharedWeights]:
    def weights(block: Block) -> list[tuple[list[Place], Any]]:
        found: dict[int, tuple[list[Place], Any]] = {}
        for place in places_of(block):
            found.setdefault(id(place.weight), ([], take_apart(place.weight)))[0].append(place)
        return list(found.values())

    return [
        SharedWeights([BlockShard(i, weights(b), rank, ranks, torch.device("cpu")) for i, b in enumerate(blocks)], ranks)
        for rank in range(ranks)
    ]


def emptied(blocks: list[Block]) -> None:
    with torch.no_grad():
        for block in blocks:
            for weight in [*block.parameters(), *block.buffers()]:
                weight.zero_()


def forward(weights: SharedWeights, transport: Loopback, blocks: list[Block], lane: ThreadLane | None, order: Sequence[int]) -> Tensor:
    x = torch.linspace(-1, 1, 32).view(2, 16)
    with torch.inference_mode(), weights.gathering(transport, lane) as gathering:
        for index in order:
            gathering.enter(index)
            x = blocks[index](x)
            gathering.leave(index)
    return x


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2), (2, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_blocks_compute_with_gathered_weights_and_have_their_own_behind_it(ranks: int, order: tuple[int, ...], ahead: bool) -> None:
    blocks = [Block(seed) for seed in range(3)]
    x = torch.linspace(-1, 1, 32).view(2, 16)
    with torch.inference_mode():
        expected = x
        for index in order:
            expected = blocks[index](expected)
    world = shared(blocks, ranks)
    emptied(blocks)
    before = [(place.module, place.name, id(place.weight)) for block in blocks for place in places_of(block)]
    lane = ThreadLane() if ahead else None
    for rank in range(ranks):
        transport = Loopback(rank, world)
        assert torch.equal(forward(world[rank], transport, blocks, lane, order), expected)
        assert [(place.module, place.name, id(place.weight)) for block in blocks for place in places_of(block)] == before
        if order == (0, 1, 2):
            assert transport.gathers == [0, 1, 2], "a block was gathered more than once, or too late"
            assert transport.stats.bytes_sent == world[rank].gathered_bytes


def test_a_failure_in_a_block_leaves_nothing_in_it() -> None:
    blocks = [Block(seed) for seed in range(3)]
    world, lane = shared(blocks, 2), ThreadLane()
    before = [id(place.weight) for block in blocks for place in places_of(block)]
    with contextlib.suppress(KeyError), world[0].gathering(Loopback(0, world), lane) as gathering:
        gathering.enter(0)
        gathering.enter(1)  # code of another pack may call a block inside a block
        assert [id(place.weight) for block in blocks[:2] for place in places_of(block)] != before
        raise KeyError
    assert [id(place.weight) for block in blocks for place in places_of(block)] == before


def test_on_a_device_weights_come_by_what_keeps_no_buffers_of_their_size() -> None:
    assert [row.name for row in WITHOUT_BUFFERS if not row.spare] == ["shm", "nccl", "gloo"]
    assert [row.name for row in WITHOUT_BUFFERS if row.spare] == ["peer", "staged-shm", "staged-gloo"]


# -- faults


def swapped_shards(world: list[SharedWeights]) -> None:
    for mine, others in zip(world[0].shards, world[1].shards, strict=True):
        mine.shard, others.shard = others.shard, mine.shard


def one_block_late(world: list[SharedWeights]) -> None:
    for weights in world[1:]:
        parts = [shard.shard for shard in weights.shards]
        for shard, part in zip(weights.shards, [parts[-1], *parts[:-1]], strict=True):
            shard.shard = part


def another_lora(world: list[SharedWeights]) -> None:
    blocks = [Block(seed) for seed in range(3)]
    with torch.no_grad():
        for block in blocks:
            block.first.weight += 0.01
    world[1] = shared(blocks, 2)[1]


def stale(world: list[SharedWeights]) -> None:
    """What a rank had before another model was loaded."""
    world[1] = shared([Block(seed + 9) for seed in range(3)], 2)[1]


@pytest.mark.parametrize("fault", [swapped_shards, one_block_late, another_lora, stale])
def test_wrong_bytes_are_noticed_before_a_block_computes(fault: Any) -> None:
    blocks = [Block(seed) for seed in range(3)]
    world = shared(blocks, 2)
    forward(world[0], Loopback(0, world), blocks, None, (0, 1, 2))
    fault(world)
    with pytest.raises(WrongWeights, match="rank 0 gathered other weights of block 0"):
        forward(world[0], Loopback(0, world), blocks, None, (0, 1, 2))
