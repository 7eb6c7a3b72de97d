"""The copies of the copy engines as Python asks for them. The CUDA runtime is stood in for: its copies are made in this process."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
import torch

from sp_core.comm.native.addresses import Exchange, ExchangeKind
from sp_core.comm.native.cpu import CExchange
from sp_core.comm.native.cuda import CLaunch, CudaError
from sp_core.comm.native.cuda_runtime import CControl, CudaRuntime, declared, exchange_of
from sp_core.layout import shard_range


class InMemory(CudaRuntime):
    """Every call that is asked for, in order; copies are made at once."""

    def __init__(self) -> None:
        self.device, self.calls = 0, []
        self.slots_offset = 64

    def _call(self, name: str, *arguments: int) -> None:
        self.calls.append(name)
        if name == "cudaMemcpyAsync":
            into, source, size, _, _ = arguments
            ctypes.memmove(into, source, size)
        elif name == "cudaMemcpy2DAsync":
            into, target_pitch, source, source_pitch, width, height, _, _ = arguments
            assert width <= min(target_pitch, source_pitch)
            for row in range(height):
                ctypes.memmove(into + row * target_pitch, source + row * source_pitch, width)

    def _launch(self, kernel: str, blocks: int, threads: int, launch: CLaunch, stream: int) -> None:
        self.calls.append(kernel)


def launch_of(exchange: Exchange, rank: int, sources: list[torch.Tensor], slots: list[torch.Tensor]) -> CLaunch:
    launch = CLaunch(exchange=CExchange.of(exchange), rank=rank, fixed_slot=1, slot_bytes=1 << 16, blocks=exchange.world_size)
    for index, tensor in enumerate(sources):
        launch.sources[index] = tensor.data_ptr()
        launch.source_batch[index] = tensor.stride(0) * tensor.element_size()
        launch.source_token[index] = tensor.stride(1) * tensor.element_size()
    for peer, slot in enumerate(slots):
        launch.peers[peer] = slot.data_ptr()
    return launch


@pytest.mark.parametrize("counts", [(4, 4), (5, 3, 0), (1, 2, 3)])
@pytest.mark.parametrize("kind", ExchangeKind)
@pytest.mark.parametrize("batch", [1, 2])
def test_copies_put_every_byte_in_its_place(kind: ExchangeKind, counts: tuple[int, ...], batch: int) -> None:
    world_size, T, H, D, n = len(counts), sum(counts), 7, 5, 3 if kind is ExchangeKind.SCATTER_HEADS else 1
    exchange = Exchange(kind, n, batch, H, D, counts)
    slots = [torch.full((64 + (2 << 16),), 0xA5, dtype=torch.uint8) for _ in counts]
    whole = torch.randint(0, 256, (n, batch, T, H, D), dtype=torch.uint8)
    edges = [0, *torch.tensor(counts).cumsum(0).tolist()]
    tokens = [slice(low, high) for low, high in pairwise(edges)]
    heads = [slice(*shard_range(H, world_size, rank)) for rank in range(world_size)]
    every = slice(None)
    for rank in range(world_size):
        gathers = kind is ExchangeKind.GATHER_HEADS
        mine = whole[:, :, every if gathers else tokens[rank], heads[rank] if gathers else every]
        # a fused q, k, v has gaps between its tokens; heads are contiguous
        sources = [x.contiguous() if gathers or batch == 2 else x for x in mine]
        library = InMemory()
        library.copy(launch_of(exchange, rank, sources, slots), 0)
        assert library.calls[-2:] == ["signal_kernel", "wait_kernel"]
    for rank, slot in enumerate(slots):
        of = {ExchangeKind.SCATTER_HEADS: (every, heads[rank]), ExchangeKind.GATHER_HEADS: (tokens[rank], every)}.get(kind, (every, every))
        wanted = whole[:, :, of[0], of[1]]
        start = 64 + (1 << 16)
        for index in range(n):
            place = start + index * exchange.tensor_stride(rank)
            assert torch.equal(slot[place : place + wanted[index].numel()], wanted[index].flatten())
        end = start + exchange.slot_bytes(rank)
        assert bool((slot[:start] == 0xA5).all()) and bool((slot[end:] == 0xA5).all())


def test_a_token_that_is_broadcast_is_copied_as_often() -> None:
    exchange = Exchange(ExchangeKind.ALL_GATHER, 1, 1, 1, 8, (3, 3))
    slots = [torch.zeros(64 + (2 << 16), dtype=torch.uint8) for _ in range(2)]
    row = torch.arange(1, 9, dtype=torch.uint8)
    for rank in range(2):
        InMemory().copy(launch_of(exchange, rank, [row.view(1, 1, 8).expand(1, 3, 8)], slots), 0)
    for slot in slots:
        assert torch.equal(slot[64 + (1 << 16) :][:48], row.repeat(6))


def test_a_launch_says_which_exchange_it_carries() -> None:
    exchange = Exchange(ExchangeKind.GATHER_HEADS, 1, 2, 56, 256, (75, 76, 75))
    assert exchange_of(CLaunch(exchange=CExchange.of(exchange))) == exchange


@pytest.mark.parametrize("blocks", [0, 1, 513])
def test_a_launch_that_the_kernel_does_not_allow_is_refused(blocks: int) -> None:
    exchange = Exchange(ExchangeKind.ALL_GATHER, 1, 1, 1, 8, (3, 3))
    with pytest.raises(CudaError, match=f"{blocks} blocks for 2 ranks"):
        InMemory().push(CLaunch(exchange=CExchange.of(exchange), blocks=blocks), 0)


def test_a_function_that_a_library_lacks_is_named() -> None:
    assert declared(ctypes.CDLL(None), {"strlen": [ctypes.c_char_p], "cudaNoSuch": []}) == "CUDA has no function cudaNoSuch"


def test_slots_start_behind_the_control_block() -> None:
    assert ctypes.sizeof(CControl) == 4 * 16 * 8 + 16 * 512 * 8
