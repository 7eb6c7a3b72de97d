"""A small picture of a matrix, with torch alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CELL = 48
#: 3 x 5 pixels, rows from the top, one bit a pixel
_DIGITS = {
    "0": (7, 5, 5, 5, 7),
    "1": (2, 6, 2, 2, 7),
    "2": (7, 1, 7, 4, 7),
    "3": (7, 1, 7, 1, 7),
    "4": (5, 5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7),
    "6": (7, 4, 7, 5, 7),
    "7": (7, 1, 1, 1, 1),
    "8": (7, 5, 7, 5, 7),
    "9": (7, 5, 7, 1, 7),
    ".": (0, 0, 0, 0, 2),
}
#: colours from nothing to the fastest link
_RAMP = torch.tensor([[0.16, 0.18, 0.32], [0.13, 0.45, 0.52], [0.35, 0.72, 0.40], [0.98, 0.88, 0.30]])
_BACKGROUND = 0.08


def heat_map(rates: Sequence[Sequence[float]], unit: float = 1e9) -> Tensor:
    """Picture of a square matrix: brighter is faster, numbers are in ``unit`` (GB/s).

    Returns (1, height, width, 3), float, 0 to 1; row and column headings are the indices.
    """
    size = len(rates)
    canvas = torch.full(((size + 1) * CELL, (size + 1) * CELL, 3), _BACKGROUND)
    top = max((rate for row in rates for rate in row), default=0.0)
    for index in range(size):
        _write(canvas, str(index), index + 1, 0, white=True)
        _write(canvas, str(index), 0, index + 1, white=True)
        for other in range(size):
            if index == other:
                continue
            share = rates[index][other] / top if top else 0.0
            y, x = (index + 1) * CELL, (other + 1) * CELL
            canvas[y + 1 : y + CELL - 1, x + 1 : x + CELL - 1] = _colour(share)
            _write(canvas, _short(rates[index][other] / unit), index + 1, other + 1, white=share < 0.5)
    return canvas[None]


def _colour(share: float) -> Tensor:
    place = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(place), len(_RAMP) - 2)
    return torch.lerp(_RAMP[low], _RAMP[low + 1], place - low)


def _short(value: float) -> str:
    """At most four characters."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _write(canvas: Tensor, text: str, row: int, column: int, white: bool) -> None:
    scale = 2
    height, width = 5 * scale, (4 * len(text) - 1) * scale
    y0, x0 = row * CELL + (CELL - height) // 2, column * CELL + (CELL - width) // 2
    for place, character in enumerate(text):
        for y, bits in enumerate(_DIGITS[character]):
            for x in range(3):
                if bits >> (2 - x) & 1:
                    left, above = x0 + (4 * place + x) * scale, y0 + y * scale
                    canvas[above : above + scale, left : left + scale] = 1.0 if white else 0.0
