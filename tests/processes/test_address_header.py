"""The index arithmetic of csrc/all2all_addresses.h, compiled here, beside the Python reference of tests/unit/test_addresses.py."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Iterator
from ctypes import c_int64, c_uint64
from pathlib import Path

import pytest
from cxx import compiler
from generated_exchanges import contiguous_strides, generated_exchange, source_rows
from oracles.addresses import block_share, place_of, row_at, vector_bytes

from sp_core.comm.native.addresses import ALIGN, MAX_WORLD, Copy, Exchange
from sp_core.comm.native.cpu import CExchange

ROOT = Path(__file__).parents[2]
GENERATED = 1200


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
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("layout") / "probe.so"
    source = Path(__file__).with_name("addresses_probe.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run([found, *flags, "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", str(source), "-o", str(library)], check=True)
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
