"""A small picture of a matrix of rates.

Its numbers are drawn by Pillow, which every ComfyUI has, and a ComfyUI is where the picture is
shown. Without Pillow there are only colours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: height and width of a cell, in pixels
CELL = 48
#: colours (red, green, blue) from nothing to the fastest link
_RAMP = torch.tensor([[0.16, 0.18, 0.32], [0.13, 0.45, 0.52], [0.35, 0.72, 0.40], [0.98, 0.88, 0.30]])
_BACKGROUND = 0.08


def heat_map(rates: Sequence[Sequence[float]], unit: float = 1e9) -> Tensor:
    """Picture of a square matrix: brighter is faster, numbers are in ``unit`` (GB/s).

    Returns (1, height, width, 3), fp32, 0 to 1. Rows and columns are headed by their indices.
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
    """At most four characters, below ten thousand."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _write(canvas: Tensor, text: str, row: int, column: int, white: bool) -> None:
    """Put ``text`` in the middle of a cell."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return
    image = Image.new("L", (CELL, CELL))
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = draw.textbbox((0, 0), text)
    draw.text(((CELL - right - left) / 2, (CELL - bottom - top) / 2), text, fill=255)
    ink = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(CELL, CELL, 1) / 255
    cell = canvas[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
    cell.lerp_(torch.full_like(cell, float(white)), ink)
