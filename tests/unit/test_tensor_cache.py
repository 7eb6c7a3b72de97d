"""What the workers hold already is known by its bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sp_core.pool import wire
from sp_core.pool.tensor_cache import SMALLEST, TensorCache

NUMBERS = torch.arange(float(SMALLEST)).reshape(2, -1)
NOT_A_NUMBER = torch.full((SMALLEST,), float("nan"))
LARGE = torch.arange(wire.SERIAL_BYTES // 4 + 1, dtype=torch.float32)


@pytest.mark.parametrize(
    ("held", "now", "same"),
    [
        (NUMBERS, NUMBERS.clone(), True),
        (NUMBERS, NUMBERS + 1, False),
        (NUMBERS, NUMBERS.double(), False),
        (NUMBERS, NUMBERS.flatten(), False),
        (NUMBERS, NUMBERS.T.contiguous().T, True),
        (NUMBERS.T, NUMBERS.T.contiguous(), True),
        (NOT_A_NUMBER, NOT_A_NUMBER.clone(), True),
        (torch.zeros(SMALLEST), -torch.zeros(SMALLEST), False),
        (LARGE, LARGE.clone(), True),
        (LARGE, LARGE.flip(0), False),
    ],
    ids=["equal", "other numbers", "another dtype", "another shape", "strided now", "strided then", "nan", "signs", "large", "large other"],
)
def test_a_value_is_named_again_where_its_bits_are_held(held: Tensor, now: Tensor, same: bool) -> None:
    cache = TensorCache()
    assert cache.entry("x", held) == {"store": 1}
    assert cache.entry("x", now) == ({"cached": 1} if same else {"store": 2})


def test_a_value_that_changes_in_place_is_another() -> None:
    cache, value = TensorCache(), NUMBERS.clone()
    cache.entry("x", value)
    value[0, 0] += 1
    assert cache.entry("x", value) == {"store": 2}


@pytest.mark.parametrize(
    "tensor",
    [
        NUMBERS,
        NUMBERS.bfloat16(),
        torch.tensor(3),
        LARGE,
        NUMBERS.T,
        torch.empty(0, 3),
        torch.complex(NUMBERS, NUMBERS).conj(),
        torch.nn.Parameter(NUMBERS),
    ],
    ids=["fp32", "bf16", "one", "large", "strided", "nothing", "conjugate", "parameter"],
)
def test_it_is_written_as_it_reads(tensor: Tensor) -> None:
    encoded = wire.encode([tensor])
    header, offsets, total = wire.pack(encoded.tree, [{}], encoded.tensors)
    buffer = torch.zeros(total, dtype=torch.uint8)
    wire.write(buffer, header, offsets, encoded.tensors)
    (read,) = wire.unpack(buffer, len(header), torch.device("cpu"))
    assert torch.equal(read, tensor.detach()) and read.dtype == tensor.dtype
