"""The shared-memory exchange: bit-exact whatever the timing, and outputs belong to the caller."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import deque
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from campaign import CAMPAIGN
from cxx import compiler
from distributed.exchange_cases import same_bytes
from distributed.ranks import run_ranks

from sp_core.comm.transports.shm import ShmTransport
from sp_core.comm.transports.shm_slots import OwnSlots, rounded_capacity
from sp_core.layout import shard_range, shard_sizes


def held_bytes(slots: OwnSlots) -> int:
    """Capacity of all slots, in use or free."""
    return sum(slot.capacity for slot in slots._slots)


def back_to_back(rank: int, world_size: int, exchanges: int) -> int:
    """Random exchanges without a pause between them, ranks delayed at random; outputs are judged much later."""
    transport = ShmTransport.create()
    shared, own = random.Random(11), random.Random(rank)
    kept: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
    for number in range(exchanges):
        counts = [shared.randint(0, 9) for _ in range(world_size)]
        B, H, D = shared.randint(1, 2), shared.randint(1, 9), shared.choice((1, 5, 8, 64))
        n, kind, seed = shared.randint(1, 3), shared.randint(0, 2), shared.randrange(2**31)
        T, start = sum(counts), sum(counts[:rank])
        low, high = shard_range(H, world_size, rank)
        whole_nBTHD = torch.randint(0, 256, (n, B, T, H, D), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        mine = slice(start, start + counts[rank])
        if own.random() < 0.05:
            time.sleep(own.random() * 2e-3)
        if kind == 0:
            outputs = transport.scatter_heads(list(whole_nBTHD[:, :, mine]), counts)
            wanted = list(whole_nBTHD[..., low:high, :])
        elif kind == 1:
            outputs = [transport.gather_heads(whole_nBTHD[0][..., low:high, :], H, counts)]
            wanted = [whole_nBTHD[0][:, mine]]
        else:
            outputs, wanted = [transport.all_gather_tokens(whole_nBTHD[0][:, mine], counts)], [whole_nBTHD[0]]
        kept.extend((number, have, want) for have, want in zip(outputs, wanted, strict=True))
        while len(kept) > own.randint(0, 12):
            number, have, want = kept.popleft()
            assert same_bytes(have, want), f"rank {rank}, exchange {number}"
            have.fill_(rank)  # outputs are the caller's: writing to one must reach nobody
    assert all(same_bytes(have, want) for _, have, want in kept)
    transport.close()
    return transport.stats.exchanges


def test_exchanges_back_to_back_with_random_delays() -> None:
    exchanges = 5000 if CAMPAIGN else 1500
    assert run_ranks(4, back_to_back, exchanges) == [exchanges] * 4


def keep_everything(rank: int, world_size: int) -> int:
    transport = ShmTransport.create()
    counts, H = shard_sizes(96, world_size), 8
    outputs = []
    for number in range(40):
        x_BtHD = torch.full((1, counts[rank], H, 64), float(number))
        outputs.append(transport.scatter_heads([x_BtHD, x_BtHD + 0.5], counts))
    held = held_bytes(transport.own_slots)
    transport.close()  # tensors outlive their transport
    for number, (a, b) in enumerate(outputs):
        assert bool((a == number).all())
        assert bool((b == number + 0.5).all())
        a.zero_()
        assert bool((b == number + 0.5).all())
    return held


def test_outputs_that_are_kept_are_never_overwritten() -> None:
    output = 2 * 96 * 4 * 64 * 4
    for held in run_ranks(2, keep_everything):
        assert held >= 40 * output


def steady(rank: int, world_size: int) -> tuple[int, int]:
    """Bytes of all slots after 5 and after 60 rounds of what a model does."""
    transport = ShmTransport.create()
    counts = shard_sizes(256, world_size)
    held = []
    for number in range(60):
        q = torch.randn(1, counts[rank], 8, 64)
        attended = transport.scatter_heads([q, q, q], counts)[0]
        q = transport.gather_heads(attended, 8, counts)
        small = transport.all_gather_tokens(q[..., :1, :], counts)
        del attended, small
        if number in (4, 59):
            held.append(held_bytes(transport.own_slots))
    transport.close()
    return held[0], held[1]


def test_memory_of_a_repeating_model_does_not_grow() -> None:
    for early, late in run_ranks(2, steady):
        assert late <= early


def one_at_a_time(rank: int, world_size: int) -> list[int]:
    """Bytes of slots behind each of some exchanges of several sizes, of which each output is dropped before the next."""
    transport = ShmTransport.create()
    for _ in range(6):
        transport.all_gather_tokens(torch.zeros(1, 100, 64), [100] * world_size)
    transport.hold_little()
    held = []
    for number in range(12):
        tokens = (30_000, 30_000, 9_000)[number % 3]
        x_Bt = torch.full((1, tokens, 8), float(rank + number))
        output = transport.all_gather_tokens(x_Bt, [tokens] * world_size)
        assert output[0, ::tokens, 0].tolist() == [float(other + number) for other in range(world_size)]
        del output
        held.append(held_bytes(transport.own_slots))
    transport.close()
    return held


def test_a_transport_that_is_to_hold_little_has_room_for_one_exchange() -> None:
    largest = rounded_capacity(2 * 30_000 * 8 * 4)
    for held in run_ranks(2, one_at_a_time):
        assert max(held[3:]) == largest and held[5] == rounded_capacity(2 * 9_000 * 8 * 4), held


def two_groups(rank: int, world_size: int, directory: str) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    transport = ShmTransport.create(groups[rank // 2], directory=directory)
    for number in range(50):
        tokens = torch.full((1, 3, 2), float(10 * number + rank))
        gathered = transport.all_gather_tokens(tokens, [3, 3])
        first = 10 * number + rank // 2 * 2
        assert gathered[0, :, 0].tolist() == [first] * 3 + [first + 1] * 3
    transport.close()


def test_sub_groups_share_a_directory(tmp_path: Path) -> None:
    run_ranks(4, two_groups, str(tmp_path))


def without_memory_files(rank: int, world_size: int, directory: str) -> list[str]:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    os.memfd_create = refuse
    transport = ShmTransport.create(directory=directory)
    left = os.listdir(directory)
    gathered = transport.all_gather_tokens(torch.full((1, 1, 4), float(rank)), [1] * world_size)
    assert gathered[0, :, 0].tolist() == list(range(world_size))
    transport.close()
    return left


def test_files_in_the_private_directory_take_over_and_leave_no_name(tmp_path: Path) -> None:
    left = run_ranks(2, without_memory_files, str(tmp_path))
    assert left[0] == left[1] == []


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_core_is_clean_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "stress"
    source = Path(__file__).with_name("shm_stress.cpp")
    flags = ["-std=c++20", "-O1", "-g", f"-fsanitize={sanitizer}", "-pthread"]
    built = subprocess.run([found, *flags, str(source), "-o", str(program)], capture_output=True, text=True)
    if built.returncode and "fsanitize" in built.stderr + built.stdout:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    for world_size, exchanges in ((4, 5000), (9, 500)):
        ran = subprocess.run([str(program), str(world_size), str(exchanges), "1"], capture_output=True, text=True)
        if "unexpected memory mapping" in ran.stderr:
            pytest.skip("the sanitizer does not run on this kernel")
        assert (ran.returncode, ran.stdout) == (0, "clean\n"), ran.stdout + ran.stderr


def test_capacity_is_rounded_up_by_an_eighth_at_most() -> None:
    for size in [1, 65536, 65537, 100_000, 1 << 20, (1 << 20) + 1, 3_000_001, 1 << 31, (1 << 31) + 1]:
        capacity = rounded_capacity(size)
        assert capacity >= size
        assert capacity % 4096 == 0
        assert capacity <= max(65536, size * 9 / 8)


def test_slots_are_reused_and_returned() -> None:
    file = os.memfd_create("slots")
    try:
        slots = OwnSlots(file, 100)
        slot = slots.take(1_000_000)
        lease = slots.lend(slot)
        lease[:3] = b"abc"
        other = slots.take(1_000_000)
        assert other.offset >= slot.offset + slot.capacity
        del lease
        assert slots.take(900_000) is slot
        slots.give_back(slot)
        slots.give_back(other)
        for number in range(30):  # sizes change: what nobody wants any more goes back to the system
            slots.give_back(slots.take(5_000_000 + number))
        slots.take(50_000_000)
        assert held_bytes(slots) < 60_000_000
        assert os.fstat(file).st_blocks * 512 < 70_000_000
        slots.close()
    finally:
        os.close(file)
