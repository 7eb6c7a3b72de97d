"""The wire format: what goes in comes out, and what is malformed is refused."""

from __future__ import annotations

import json
import math
import random
import re
import uuid

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sp_core.pool import wire
from sp_core.pool.errors import WireError

CPU = torch.device("cpu")


def message(value) -> tuple[torch.Tensor, int]:
    encoded = wire.encode(value)
    header, offsets, total = wire.pack(encoded.tree, [{} for _ in encoded.tensors], encoded.tensors)
    buffer = torch.zeros(total, dtype=torch.uint8)
    wire.write(buffer, header, offsets, encoded.tensors)
    return buffer, len(header)


def round_trip(value):
    buffer, header_bytes = message(value)
    return wire.unpack(buffer, header_bytes, CPU)


scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=20)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9) | st.tuples(st.text(max_size=3), st.integers(0, 9)), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_plain_trees_come_back_equal_and_of_the_same_types(tree):
    back = round_trip(tree)
    assert back == tree
    assert repr(back) == repr(tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 5)])
def test_tensors_come_back_bit_for_bit(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = round_trip([tensor])[0]
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.view(torch.uint8) if back.dim() else back, tensor.view(torch.uint8) if tensor.dim() else tensor)


def test_views_are_sent_as_what_they_show():
    base = torch.arange(24).view(4, 6)
    assert torch.equal(round_trip(base.t()[1:4, ::2]), base.t()[1:4, ::2])


def test_special_values():
    name = uuid.uuid4()
    back = round_trip({"dtype": torch.bfloat16, "device": torch.device("meta"), "uuid": name, "size": torch.Size((1, 2)), "nan": math.nan})
    assert back["dtype"] is torch.bfloat16
    assert back["device"] == CPU, "a device means the receiver's own"
    assert back["uuid"] == name
    assert isinstance(back["size"], torch.Size)
    assert math.isnan(back["nan"])


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": {"b": [1, object()]}}, "a.b.1"),
        ({"f": print}, "f"),
        ([torch.zeros(1, dtype=torch.complex128)], "0"),
        ({"s": b"bytes"}, "s"),
    ],
)
def test_what_is_no_plain_data_is_named(value, place):
    with pytest.raises(WireError, match=f"'{place}'"):
        wire.encode(value)


class Unsendable:
    """Neither plain data nor a tensor."""


odd = st.sampled_from([Unsendable(), print, b"bytes", torch.zeros(1, dtype=torch.complex128), torch.complex128, np.zeros(3)])
sendable = st.sampled_from(
    [torch.zeros(2), torch.Size((1, 2)), torch.float32, torch.device("cpu"), uuid.UUID(int=1), np.float32(1), {1, 2}]
)


def nested_mostly(leaves):
    keys = st.text(max_size=3) | st.integers(0, 9) | st.sampled_from([Unsendable()])
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
    )


@settings(max_examples=300, deadline=None)
@given(nested_mostly(scalars | sendable | odd))
def test_what_can_be_sent_is_known_without_encoding_it(tree):
    said = wire.unsendable(tree)
    event("sent" if said is None else "refused")
    if said is None:
        wire.encode(tree)
    else:
        with pytest.raises(WireError, match=f"^{re.escape(said)}$"):
            wire.encode(tree)


def test_a_tree_without_end_is_refused():
    endless: list = []
    endless.append(endless)
    with pytest.raises(WireError, match="nested deeper"):
        wire.encode(endless)
    assert "nested deeper" in wire.unsendable(endless)


def test_named_tensors_are_kept_and_found_again():
    tensor, store = torch.randn(4), {}
    encoded = wire.encode([tensor])
    header, offsets, total = wire.pack(encoded.tree, [{"store": 7}], [tensor])
    buffer = torch.zeros(total, dtype=torch.uint8)
    wire.write(buffer, header, offsets, [tensor])
    wire.unpack(buffer, len(header), CPU, store)
    buffer.zero_()  # what was kept must not be a view of the buffer
    header, _, total = wire.pack(encoded.tree, [{"cached": 7}], [])
    again = torch.zeros(total, dtype=torch.uint8)
    wire.write(again, header, [], [])
    assert torch.equal(wire.unpack(again, len(header), CPU, store)[0], tensor)
    with pytest.raises(WireError, match="was never sent"):
        wire.unpack(again, len(header), CPU, {})


def mutate(rng: random.Random, header: bytes) -> bytes:
    """One hostile header: bytes flipped, cut, or a JSON value swapped for nonsense."""
    kind = rng.randrange(4)
    if kind == 0:
        data = bytearray(header)
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    if kind == 1:
        return header[: rng.randrange(len(header))] or b"{"
    if kind == 2:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
    nonsense = [None, -1, 2**70, 1e308, "x", [], {}, [[]], {"tensor": -1}, {"tensor": 10**9}, {"dict": 3}, {"list": {"list": []}}, True]
    document = json.loads(header)

    def swap(node):
        if rng.random() < 0.15:
            return rng.choice(nonsense)
        if isinstance(node, dict):
            return {key if rng.random() < 0.95 else "?": swap(item) for key, item in node.items()}
        if isinstance(node, list):
            return [swap(item) for item in node]
        return node

    return json.dumps(swap(document)).encode()


def test_hostile_headers_are_refused_or_harmless():
    """2,000 of them: a WireError or a tree, never another exception, never a read outside the buffer."""
    rng = random.Random(0)
    body = {"x": torch.randn(3, 4), "o": {"a": [1, (2, None)], "b": {"c": torch.arange(5)}}, "u": uuid.UUID(int=1)}
    buffer, header_bytes = message(body)
    header = bytes(buffer[:header_bytes].numpy())
    refused = 0
    for _ in range(2000):
        hostile = mutate(rng, header)
        data = torch.zeros(max(buffer.numel(), len(hostile)), dtype=torch.uint8)
        data[: buffer.numel()] = buffer
        data[: len(hostile)] = torch.frombuffer(bytearray(hostile), dtype=torch.uint8)
        claimed = rng.choice([len(hostile), len(hostile), 0, -5, 2**40, data.numel() + 1])
        try:
            wire.unpack(data, claimed, CPU, {})
        except WireError:
            refused += 1
    assert refused > 1000


def test_who_is_done_before_the_next_message_may_read_without_a_copy() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    buffer, header_bytes = message({"rows": tensor})
    view, copy = (wire.unpack(buffer, header_bytes, CPU, views=views)["rows"] for views in (True, False))
    assert torch.equal(view, tensor) and torch.equal(copy, tensor)
    buffer.zero_()
    assert not view.any() and torch.equal(copy, tensor)
