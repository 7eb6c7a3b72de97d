"""Which rows a convolution needs beside its own band, from its kernel, stride, dilation and padding.

A convolution always pads by itself. At the borders of the frame that is what it does for one device; at a cut it is given
so many rows of the others that what it makes of its padding can be left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: a convolution of some rows
Compute = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ConvRows:
    """A convolution as its rows see it. All are numbers of rows."""

    kernel: int
    stride: int
    dilation: int
    #: that the convolution adds over and under the frame
    padding: int
    #: (over, under) that other code of the host has added to the frame already
    added: tuple[int, int] = (0, 0)

    @property
    def reach(self) -> int:
        """Rows between the first and the last that one row of the result is made of."""
        return self.dilation * (self.kernel - 1)

    @property
    def before(self) -> int:
        """Rows over its place that a row of the result is made of."""
        return self.padding + self.added[0]

    @property
    def left_out(self) -> int:
        """Rows of the result that a convolution which begins inside the frame makes of its padding."""
        return -(-self.padding // self.stride)

    @property
    def above(self) -> int:
        """Rows over its band that a rank needs."""
        return self.left_out * self.stride + self.added[0]

    @property
    def below(self) -> int:
        """Rows under its band that a rank needs, where the band's rows are a multiple of the stride."""
        return max(0, self.reach + 1 - self.stride - self.before)

    @property
    def is_local(self) -> bool:
        """Each row of the result comes of one row, at the same place."""
        return self.kernel == 1 and self.stride == 1 and not self.padding and self.added == (0, 0)


def conv_rows(conv: nn.Conv2d | nn.Conv3d, added: tuple[int, int] = (0, 0)) -> ConvRows:
    """What a convolution says of itself; ``added`` as in :class:`ConvRows`. Its padding has to be numbers."""
    return ConvRows(conv.kernel_size[-2], conv.stride[-2], conv.dilation[-2], int(conv.padding[-2]), added)


@contextlib.contextmanager
def unpadded_rows(conv: Any) -> Iterator[None]:
    """Inside, the module ``conv`` adds no rows over and under the frame; columns and frames it pads as before."""
    padding, repeated = conv.padding, conv._reversed_padding_repeated_twice
    conv.padding = (*padding[:-2], 0, padding[-1])
    # of columns, of rows and of frames, each at both ends
    conv._reversed_padding_repeated_twice = [*repeated[:2], 0, 0, *repeated[4:]]
    try:
        yield
    finally:
        conv.padding, conv._reversed_padding_repeated_twice = padding, repeated


def edges(rows: ConvRows, height: int) -> tuple[int, int] | None:
    """How many rows of the result of a band of ``height`` rows need others' rows, at its upper and at its lower edge.

    None where the two meet: then all of it is edge.
    """
    results = height // rows.stride
    upper = -(-rows.before // rows.stride)
    lower = results - (max(-1, (height - 1 + rows.before - rows.reach) // rows.stride) + 1)
    inner = height - rows.reach - rows.stride - rows.above
    return None if upper + lower > results or inner < 0 else (upper, lower)


@dataclass(frozen=True)
class Extended:
    """A band between what is over and under it: others' rows, or at the borders of the frame those that the host has added.

    All are (..., rows, W); the frame ends where there are no more.
    """

    above: Tensor
    own: Tensor
    below: Tensor
    rows: ConvRows

    def results(self, compute: Compute, first: int, last: int, without_padding: Compute | None = None) -> Tensor:
        """Rows [first, last) of the band's result.

        Args:
            compute: the convolution with its own padding.
            without_padding: the convolution without padding over and under the frame. Rows that need none are computed by it: of
                three rows it makes the one that is wanted, and with padding two more.
        """
        rows, over = self.rows, self.rows.added[0]
        high = (last - 1) * rows.stride - rows.before + rows.reach + 1
        exact = first * rows.stride - rows.before
        if without_padding is not None and exact >= -self.above.size(-2) and high <= self.own.size(-2) + self.below.size(-2):
            return without_padding(self._between(exact, high))
        low = max(-self.above.size(-2), (first - rows.left_out) * rows.stride - over)
        computed = compute(self._between(low, high))
        start = (first * rows.stride - over - low) // rows.stride
        if computed.size(-2) == last - first:
            return computed
        return computed[..., start : start + last - first, :].contiguous()

    def _between(self, low: int, high: int) -> Tensor:
        """Rows [low, high), counted from the band's first."""
        parts, at = [], -self.above.size(-2)
        for part in (self.above, self.own, self.below):
            start, stop = max(low, at) - at, min(high, at + part.size(-2)) - at
            if stop > start:
                parts.append(part[..., start:stop, :])
            at += part.size(-2)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)
