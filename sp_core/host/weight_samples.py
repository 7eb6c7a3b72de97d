"""Samples of weights, by which processes tell whether they hold the same ones.

All processes read one file in one way, so samples have to be equal to the last bit.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

#: places of each weight that are looked at
SAMPLES = 256


def mark_of(name: str, weight: Tensor) -> int:
    """A hash of samples of a weight, wherever it lies; 0 for what cannot be read."""
    samples = samples_of(weight)
    return 0 if samples is None else zlib.crc32(samples, zlib.crc32(name.encode())) or 1


def samples_of(weight: Tensor) -> bytes | None:
    """Values at some places of a weight, wherever it lies; None for what cannot be read."""
    try:
        plain = plain_tensor(weight.detach())
        if plain.numel() == 0 or plain.device.type == "meta":
            return None
        where = torch.unravel_index(sampled_places(plain.numel()).to(plain.device), plain.shape) if plain.dim() else ()
        values = plain[where].cpu().contiguous().reshape(-1).view(torch.uint8)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None  # a format that cannot be read at a place
    return bytes(values.tolist())


def sampled_places(count: int, samples: int = SAMPLES) -> Tensor:
    """Which of ``count`` things in a row are looked at, evenly from the first to the last."""
    number = min(count, samples)
    return torch.arange(number) * (count - 1) // max(1, number - 1)


def plain_tensor(tensor: Tensor) -> Tensor:
    """What a quantised tensor packs, as it lies in the file; float8 as bytes."""
    packed = getattr(tensor, "_qdata", tensor)
    if type(packed) not in (Tensor, torch.nn.Parameter):
        packed = packed.as_subclass(Tensor)
    return packed.view(torch.uint8) if packed.dtype.is_floating_point and packed.dtype.itemsize == 1 else packed
