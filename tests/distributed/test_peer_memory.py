"""What the peer transport does where a GPU has no room for its buffers. The driver's memory calls are stood in for; no kernel runs."""

from __future__ import annotations

import ctypes
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks

from sp_core.comm import CollectiveTransport
from sp_core.comm.errors import TransportUnavailable
from sp_core.comm.native.cuda import IPC_HANDLE_BYTES, CStatus, CudaError
from sp_core.comm.transports import peer
from sp_core.comm.transports.peer import PeerTransport
from sp_core.comm.transports.peer_memory import rounded_slot, slot_count
from sp_core.comm.transports.staged import StagedTransport
from sp_core.layout import shard_sizes

MB = 1 << 20


class Driver:
    """Buffers of a device with ``room`` bytes."""

    device, slots_offset = 0, 4096

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: dict[int, int] = {}
        self.refused = 0
        self.opened: list[int] = []
        self._addresses = itertools.count(1 << 40, 1 << 36)

    def multiprocessors(self) -> int:
        return 4

    def allocate(self, size: int) -> tuple[int, bytes]:
        if sum(self.held.values()) + size > self.room:
            self.refused += 1
            raise CudaError("out of memory")
        base = next(self._addresses)
        self.held[base] = size
        return base, base.to_bytes(IPC_HANDLE_BYTES, "little")

    def free(self, base: int) -> None:
        del self.held[base]

    def open(self, handle: bytes) -> int:
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, base: int) -> None:
        self.opened.remove(base)

    def allocate_status(self) -> tuple[int, int]:
        self._status = ctypes.create_string_buffer(ctypes.sizeof(CStatus))
        return ctypes.addressof(self._status), 0

    def free_status(self, host: int) -> None:
        pass


class OnTheHost(PeerTransport):
    device_type = "cpu"


def transport_with(room: int, **options: Any) -> tuple[PeerTransport, Driver]:
    logging.disable(logging.CRITICAL)
    nothing: Any = lambda *_: None  # noqa: E731
    torch.cuda.synchronize = torch.cuda.empty_cache = torch.cuda.is_current_stream_capturing = nothing
    driver = Driver(room)
    return OnTheHost(None, driver, timeout_s=10, should_abort=None, **options), driver  # type: ignore[arg-type]


def without_room(rank: int, world_size: int) -> tuple[list[str], list[int]]:
    transport, driver = transport_with(4096 * MB if rank != 1 else 40 * MB)
    plain = CollectiveTransport()
    names, held = [transport.name], [sum(driver.held.values()) // MB]
    counts = [400 + r for r in range(world_size)]
    H = 2 * world_size + 1
    shards = list(torch.randn(3, 1, counts[rank], H, 2048).unbind(0))
    for _ in range(2):
        for mine, theirs in zip(transport.scatter_heads(shards, counts), plain.scatter_heads(shards, counts), strict=True):
            assert torch.equal(mine, theirs)
        names.append(transport.name)
        held.append(sum(driver.held.values()) // MB)
    heads = torch.randn(1, sum(counts), shard_sizes(H, world_size)[rank], 64)
    assert torch.equal(transport.gather_heads(heads, H, counts), plain.gather_heads(heads, H, counts))
    assert torch.equal(transport.all_gather_tokens(shards[0], counts), plain.all_gather_tokens(shards[0], counts))
    transport.trim()
    names.append(transport.name)
    held.append(sum(driver.held.values()) // MB)
    transport.close()
    assert driver.held == {} and driver.opened == []
    return names, held


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_room_on_one_rank_all_take_the_plain_collective(world_size: int) -> None:
    names = ["peer", "gloo in place of peer", "gloo in place of peer", "peer"]
    # nothing is held where nothing is used, and after that it is tried anew
    assert run_ranks(world_size, without_room) == [(names, [32, 0, 0, 32])] * world_size


def short_for_long(rank: int, world_size: int) -> tuple[str, int]:
    """Eight exchanges of which the second is too large; growing is tried again behind the fourth and the seventh."""
    peer._PATIENCE = 3
    staged = lambda: StagedTransport(CollectiveTransport(None, "gloo"))  # noqa: E731
    transport, driver = transport_with(4096 * MB if rank != 1 else 40 * MB, plain=staged)
    plain = CollectiveTransport()
    shard = torch.randn(1, 800, world_size, 4096)
    for _ in range(8):
        assert torch.equal(transport.scatter_heads([shard], [800] * world_size)[0], plain.scatter_heads([shard], [800] * world_size)[0])
    name = transport.name
    transport.close()
    return name, driver.refused


def test_room_is_asked_for_again_after_a_while() -> None:
    assert run_ranks(2, short_for_long) == [("staged-gloo in place of peer", 0), ("staged-gloo in place of peer", 3)]


def cannot_launch(rank: int, world_size: int) -> str:
    transport, driver = transport_with(4096 * MB)

    def push(launch: object, stream: int) -> None:
        if rank == 0:
            raise CudaError("invalid device function")
        # the other goes on, to where it would look at its slot

    torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=0, synchronize=lambda: None)  # type: ignore[assignment]
    driver.push = push  # type: ignore[attr-defined]
    with pytest.raises(TransportUnavailable) as caught:
        transport._faster_method()
    return str(caught.value)


def test_an_error_on_one_rank_while_measuring_is_heard_by_all() -> None:
    assert run_ranks(2, cannot_launch, timeout=30) == ["rank 0 could not exchange: invalid device function"] * 2


def grown(rank: int, world_size: int) -> list[int]:
    transport, driver = transport_with(4096 * MB)
    sizes = []
    for need in (30 * MB, 700 * MB):
        transport._grow(need, b"an exchange")
        sizes.append(driver.held[next(iter(driver.held))] // MB)
    transport.trim()
    sizes.append(sum(driver.held.values()) // MB)
    transport.close()
    return sizes


def test_buffers_grow_and_go_back() -> None:
    assert run_ranks(2, grown) == [[4 * 38, 3 * 700, 32]] * 2


@pytest.mark.parametrize(
    ("need", "slot", "count"),
    [
        (1, 2, 4),
        (8 * MB, 10, 4),
        (128 * MB, 160, 4),
        (128 * MB + 1, 130, 4),
        (256 * MB, 256, 4),
        (256 * MB + 1, 258, 3),
        (1450 * MB, 1450, 3),
    ],
)
def test_slots(need: int, slot: int, count: int) -> None:
    assert rounded_slot(need) == slot * MB
    assert slot_count(slot * MB) == count
