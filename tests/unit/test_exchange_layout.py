"""The index arithmetic of an exchange: the Python reference against its meaning, the C++ header against the reference."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Iterator
from ctypes import c_int64, c_uint64
from pathlib import Path

import pytest
from oracles.addresses import block_share, place_of, row_at, vector_bytes

from sp_core.comm.native.addresses import ALIGN, MAX_WORLD, Copy, Exchange, ExchangeKind
from sp_core.comm.native.cpu import CExchange
from sp_core.comm.native.cuda import CLaunch, CStatus
from sp_core.comm.transports.peer import block_count
from sp_core.layout import shard_sizes

ROOT = Path(__file__).parents[2]
GENERATED = 1200


def generated_exchange(random: random.Random, large: bool) -> Exchange:
    world_size = random.randint(1, MAX_WORLD)
    # 200,000 tokens of 32 KB: each product of the arithmetic passes 2^31 by itself
    most = 200_000 if large else 7
    counts = tuple(random.choice((0, random.randint(0, most), most)) for _ in range(world_size))
    return Exchange(
        kind=random.choice(list(ExchangeKind)),
        tensors=random.randint(1, 4),
        batch=random.randint(1, 4 if large else 3),
        heads=random.randint(1, 64 if large else 9),
        head_bytes=random.choice((2, 128, 256, 512) if large else (1, 2, 3, 6, 16, 40)),
        token_counts=counts,
    )


def source_rows(exchange: Exchange, rank: int) -> tuple[int, int]:
    """(tokens, heads) of a tensor that ``rank`` brings."""
    if exchange.kind is ExchangeKind.GATHER_HEADS:
        return exchange.tokens, exchange.heads_of(rank)
    return exchange.token_counts[rank], exchange.heads


def contiguous_strides(exchange: Exchange, rank: int) -> tuple[int, int]:
    tokens, heads = source_rows(exchange, rank)
    return tokens * heads * exchange.head_bytes, heads * exchange.head_bytes


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


# header against reference


class CCopy(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in Copy.__dataclass_fields__]

    def value(self) -> Copy:
        return Copy(*(getattr(self, name) for name in Copy.__dataclass_fields__))


class CRow(ctypes.Structure):
    _fields_ = [("source", c_int64), ("target", c_int64)]


class CShare(ctypes.Structure):
    _fields_ = [("peer", ctypes.c_int32), ("index", ctypes.c_int32), ("count", ctypes.c_int32)]


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("layout") / "probe.so"
    source = Path(__file__).with_name("addresses_probe.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run([compiler, *flags, "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def copy_in_header(header: ctypes.CDLL, exchange: CExchange, *numbers: int) -> CCopy:
    source, target, tensor, batch_stride, token_stride, merge = numbers
    copy = CCopy()
    header.probe_copy(
        ctypes.byref(exchange), source, target, tensor, c_int64(batch_stride), c_int64(token_stride), merge, ctypes.byref(copy)
    )
    return copy


def check_case(header: ctypes.CDLL, random: random.Random, exchange: Exchange) -> int:
    """Compares one case; returns the largest offset that was seen."""
    native, largest, ranks = CExchange.of(exchange), 0, range(exchange.world_size)
    sizes = (c_int64 * 3)()
    for rank in ranks:
        header.probe_sizes(ctypes.byref(native), rank, sizes)
        assert list(sizes) == [exchange.output_bytes(rank), exchange.tensor_stride(rank), exchange.slot_bytes(rank)]
    for _ in range(6):
        source, target, tensor = random.choice(ranks), random.choice(ranks), random.randrange(exchange.tensors)
        strides = contiguous_strides(exchange, source)
        if random.random() < 0.5:  # a slice of something wider
            strides = strides[0] * 3, strides[1] * 3
        want = exchange.copy_between(source, target, tensor, *strides)
        have = copy_in_header(header, native, source, target, tensor, *strides, 0)
        assert have.value() == want
        rows = want.batch * want.tokens
        for row in {0, rows - 1, random.randrange(rows)} if rows else ():
            at = CRow()
            header.probe_row(ctypes.byref(have), c_int64(row), ctypes.byref(at))
            assert (at.source, at.target) == row_at(want, row)
            largest = max(largest, at.source, at.target)
        whole = copy_in_header(header, native, source, target, tensor, *strides, 1).value()
        assert [*range_of(whole)] == [*range_of(want)] if rows < 50 else whole.run_bytes * whole.tokens == want.run_bytes * want.tokens
        for address in (0, random.randrange(4096)):
            assert header.probe_vector(ctypes.byref(have), c_uint64(address), c_uint64(ALIGN)) == vector_bytes(want, address, ALIGN)
        tokens, heads = source_rows(exchange, source)
        if tokens and heads:
            element = random.randrange(exchange.batch), random.randrange(tokens), random.randrange(heads)
            offset = c_int64()
            rank = header.probe_place(ctypes.byref(native), source, target, tensor, *map(c_int64, element), ctypes.byref(offset))
            assert (rank, offset.value) == place_of(exchange, source, target, tensor, *element)
    return largest


def range_of(copy: Copy) -> Iterator[tuple[int, int]]:
    """Every (source, target) byte of a small copy, in order."""
    for row in range(copy.batch * copy.tokens):
        at_source, at_target = row_at(copy, row)
        for byte in range(copy.run_bytes):
            yield at_source + byte, at_target + byte


def test_header_equals_reference(header: ctypes.CDLL) -> None:
    generator = random.Random(4)
    largest = max(check_case(header, generator, generated_exchange(generator, large=number % 2 == 0)) for number in range(GENERATED))
    assert largest > 2**32  # offsets that 32 bits cannot hold were among the cases


def test_block_shares_in_header_equal_reference(header: ctypes.CDLL) -> None:
    generator = random.Random(5)
    for _ in range(200):
        world_size = generator.randint(1, MAX_WORLD)
        blocks, rank = generator.randint(world_size, 300), generator.randrange(world_size)
        counts: dict[int, int] = {}
        for block in range(blocks):
            share = CShare()
            header.probe_share(block, blocks, world_size, rank, ctypes.byref(share))
            assert (share.peer, share.index, share.count) == block_share(block, blocks, world_size, rank)
            counts[share.peer] = share.count
        assert [header.probe_serving(blocks, world_size, rank, peer) for peer in range(world_size)] == [
            counts[peer] for peer in range(world_size)
        ]


# the GPU kernel itself, thread by thread on the CPU


@pytest.fixture(scope="module")
def kernel_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("kernel") / "heads_on_cpu"
    source = Path(__file__).with_name("heads_on_cpu.cpp")
    flags = ["-std=c++20", "-O1", "-pthread", "-DSP_THREADS=16", "-w"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize(("world_size", "exchanges"), [(1, 20), (2, 60), (3, 60), (5, 20)])
def test_kernel_delivers_every_byte_and_overwrites_nothing(kernel_on_cpu: Path, world_size: int, exchanges: int) -> None:
    ran = subprocess.run([str(kernel_on_cpu), str(world_size), str(exchanges), "1"], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "clean\n"), ran.stdout + ran.stderr


def test_python_and_the_kernel_mean_the_same_structures(kernel_on_cpu: Path) -> None:
    sizes = subprocess.run([str(kernel_on_cpu), "sizes"], capture_output=True, text=True, check=True).stdout
    assert sizes.split() == [str(ctypes.sizeof(CLaunch)), str(ctypes.sizeof(CStatus))]


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


def test_kernel_that_waits_for_a_lost_rank_ends_when_called_off_and_names_it(kernel_on_cpu: Path) -> None:
    ran = subprocess.run([str(kernel_on_cpu), "3", "5", "1", "away"], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "clean\n"), ran.stdout + ran.stderr
