"""Rows of one frame, moved between the ranks that hold its bands.

Shape legend: H rows of the whole frame, h this rank's rows, W columns. Rows are dim -2 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..comm import Transport
from ..comm.point_to_point import PointToPoint
from ..layout.bands import Bands


class RowExchange:
    """What one rank asks of the others while a VAE computes. All calls are collective over the ranks that have a band."""

    def __init__(self, neighbours: PointToPoint, everybody: Transport) -> None:
        """Both join the same ranks in the same order."""
        self._neighbours, self._everybody = neighbours, everybody

    @property
    def rank(self) -> int:
        return self._everybody.rank

    def halo(self, own: Tensor, bands: Bands, above: int, below: int) -> Callable[[], tuple[Tensor, Tensor]]:
        """Ask for the rows over and under this rank's band. What is returned waits for them: two tensors (..., at most ``above``
        or ``below``, W). Whoever computes meanwhile waits less.

        Args:
            own: this rank's rows, (..., h, W).
            bands: at the resolution of ``own``.
        """
        start, stop = bands.range(self.rank)
        sends = [(rows.rank, own[..., rows.start - start : rows.stop - start, :]) for rows in bands.given(self.rank, above, below)]
        needed = bands.needed(self.rank, above, below)
        received = [own.new_empty((*own.shape[:-2], rows.count, own.size(-1))) for rows in needed]
        wait = self._neighbours.start(sends, [(rows.rank, tensor) for rows, tensor in zip(needed, received, strict=True)])

        def arrived() -> tuple[Tensor, Tensor]:
            wait()
            over = [tensor for rows, tensor in zip(needed, received, strict=True) if rows.stop <= start]
            under = [tensor for rows, tensor in zip(needed, received, strict=True) if rows.start >= stop]
            return _joined(over, own), _joined(under, own)

        return arrived

    def all_rows(self, own: Tensor, bands: Bands) -> Tensor:
        """The whole frame, (..., H, W), of every rank's (..., h, W)."""
        rows_first = own.movedim(-2, 0).unsqueeze(0).contiguous()
        gathered = self._everybody.all_gather_tokens(rows_first, bands.counts)
        return gathered.squeeze(0).movedim(0, -2).contiguous()

    def every_rank(self, numbers: Tensor) -> Tensor:
        """Every rank's ``numbers`` (same shape everywhere), stacked in rank order on a new first dim."""
        gathered = self._everybody.all_gather_tokens(numbers.flatten()[None, None].contiguous(), [1] * self._everybody.world_size)
        return gathered.view(self._everybody.world_size, *numbers.shape)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, -2) if parts else like[..., :0, :]
