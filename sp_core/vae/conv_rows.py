"""Which rows a convolution needs beside its own band, from its kernel, stride, dilation and padding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: paddings at the border of the frame that can be made of the rows near it
MODES = ("zeros", "replicate", "reflect")


@dataclass(frozen=True)
class ConvRows:
    """A convolution as its rows see it. All are numbers of rows."""

    kernel: int
    stride: int
    dilation: int
    #: that the convolution adds over and under the frame
    padding: int
    #: what it adds, one of :data:`MODES`
    mode: str = "zeros"
    #: (over, under) that other code of the host has added to the frame already
    added: tuple[int, int] = (0, 0)

    @property
    def above(self) -> int:
        """Rows over its band that a rank needs."""
        return self.padding + self.added[0]

    @property
    def below(self) -> int:
        """Rows under its band that a rank needs, where the band's rows are a multiple of the stride."""
        return max(0, self.dilation * (self.kernel - 1) + 1 - self.stride - self.above)

    @property
    def is_local(self) -> bool:
        """Each row of the result comes of one row, at the same place."""
        return self.kernel == 1 and self.stride == 1 and not self.padding and self.added == (0, 0)


@dataclass(frozen=True)
class Edge:
    """Rows of a convolution's result that need rows of other ranks, at one edge of a band."""

    #: how many rows of the result
    results: int
    #: the rows of the band that they need beside the halo: [start, stop)
    start: int
    stop: int


def edges(rows: ConvRows, height: int) -> tuple[Edge, Edge] | None:
    """The upper and the lower edge of a band of ``height`` rows, or None where the two meet: then all of it is edge."""
    reach, results = rows.dilation * (rows.kernel - 1), height // rows.stride
    upper = -(-rows.above // rows.stride)
    lower = results - (max(-1, (height - 1 + rows.above - reach) // rows.stride) + 1)
    first, last = (upper - 1) * rows.stride + reach + 1 - rows.above, (results - lower) * rows.stride - rows.above
    if upper + lower > results or first > height or last < 0:
        return None
    return Edge(upper, 0, first), Edge(lower, last, height)


def conv_rows(conv: nn.Conv2d | nn.Conv3d, added: tuple[int, int] = (0, 0)) -> ConvRows:
    """What a convolution says of itself; ``added`` as in :class:`ConvRows`. Its padding has to be numbers."""
    kernel, stride, dilation = conv.kernel_size[-2], conv.stride[-2], conv.dilation[-2]
    return ConvRows(kernel, stride, dilation, int(conv.padding[-2]), conv.padding_mode, added)


def with_border(rows: Tensor, above: int, below: int, mode: str) -> list[Tensor]:
    """``rows`` (..., h, W) between what a convolution would see over and under the frame; to be joined on dim -2."""
    return [*_border(rows, above, mode, top=True), rows, *_border(rows, below, mode, top=False)]


def _border(rows: Tensor, count: int, mode: str, top: bool) -> list[Tensor]:
    if not count:
        return []
    if mode == "zeros":
        return [rows.new_zeros((*rows.shape[:-2], count, rows.size(-1)))]
    if mode == "replicate":
        edge = rows[..., :1, :] if top else rows[..., -1:, :]
        return [edge.expand(*rows.shape[:-2], count, rows.size(-1))]
    mirrored = rows[..., 1 : count + 1, :] if top else rows[..., -count - 1 : -1, :]
    return [mirrored.flip(-2)]


@contextlib.contextmanager
def without_row_padding(conv: Any) -> Iterator[None]:
    """Inside, the convolution adds no rows: its input has them."""
    padding, reversed_padding = conv.padding, conv._reversed_padding_repeated_twice
    conv.padding = (*padding[:-2], 0, padding[-1])
    # last dim first, each twice: columns, rows, frames
    conv._reversed_padding_repeated_twice = [*reversed_padding[:2], 0, 0, *reversed_padding[4:]]
    try:
        yield
    finally:
        conv.padding, conv._reversed_padding_repeated_twice = padding, reversed_padding


def joined(parts: list[Tensor]) -> Tensor:
    """The parts that have rows, one under the other."""
    parts = [part for part in parts if part.size(-2)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)
