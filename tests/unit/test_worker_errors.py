"""What a worker says of an error, and whether it can go on after it."""

from __future__ import annotations

import pytest
import torch

from sp_core.pool.worker import device_lost, sentence

ALLOCATOR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore lines")
DRIVER = torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
LOST = torch.AcceleratorError("CUDA error: unspecified launch failure\nmore")


@pytest.mark.parametrize(
    ("error", "says", "lost"),
    [
        (ALLOCATOR, "out of memory on its device (CUDA out of memory. Tried to allocate 20.00 GiB.).", False),
        (DRIVER, "out of memory on its device (CUDA error: out of memory).", False),
        (LOST, "its device does not answer any more (CUDA error: unspecified launch failure).", True),
        (MemoryError(), "out of main memory.", False),
        (ValueError(), "ValueError", False),
        (ValueError("two\nlines"), "two\nlines", False),
    ],
    ids=["allocator", "driver", "lost", "main memory", "no words", "other"],
)
def test_sentence(error: BaseException, says: str, lost: bool) -> None:
    assert sentence(error).startswith(says)
    assert device_lost(error) == lost


def test_the_code_of_the_driver_counts() -> None:
    error = torch.AcceleratorError("CUDA error: something")
    error.error_code = 2
    assert not device_lost(error)
