"""Installs a decode plan into a VAE for one call, and takes it out again.

The VAE's own code runs on this rank's band of the frame as if it were the frame. What mixes rows gets the rows of others:
a convolution the few that its kernel reaches, group norm the statistics of all, attention the whole frame.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import padding as pads

from ..errors import SPError
from ..layout.bands import Bands
from .conv_rows import Compute, ConvRows, Extended, conv_rows, edges, unpadded_rows
from .exchange import RowExchange
from .functions import RowFunctions
from .group_norm import group_norm
from .plan import DecodePlan

#: what a convolution's function takes, and what it takes where it is given nothing
_DEFAULTS = (("stride", 1), ("dilation", 1), ("padding", 0))
#: rows from which on a band is high: its edges are a small part of it
HIGH = 32

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
#: they pad by (columns, columns, rows, rows, ...)
_PADS = (pads._ConstantPadNd, pads._ReplicationPadNd, pads._ReflectionPadNd)


class BandEngine:
    """Runs one call of a VAE over the ranks that have a band.

    Args:
        bands: in rows of the latent.
        exchange: joins exactly the ranks that have a band.
        enter_call: called before everything that waits for other ranks; may raise to stop, on all ranks at the same place.
        device: that the ranks' tensors are on.
    """

    def __init__(
        self,
        plan: DecodePlan,
        bands: Bands,
        exchange: RowExchange,
        enter_call: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
    ) -> None:
        self._plan, self._bands, self._exchange, self._enter_call = plan, bands, exchange, enter_call
        self._device = torch.device("cpu") if device is None else device
        #: the code that runs now has the whole frame
        self._whole = False
        #: the code that runs now is a convolution that the engine called
        self._inside = False
        #: rows (over, under) that a padding module has just added
        self._added = (0, 0)

    @contextlib.contextmanager
    def installed(self, vae: nn.Module) -> Iterator[None]:
        """Inside, ``vae`` computes on bands; nothing is left in it after that."""
        with contextlib.ExitStack() as undo:
            for parent in vae.modules():
                for module in parent.children():
                    self._hook(module, parent, undo)
            for name in self._plan.chunk_sizes:
                functions = sys.modules[type(vae).__module__]
                _replace(functions, name, self._agreed_on(getattr(functions, name)), undo)
            for name in self._plan.limits:
                _unlimited(vae, name, undo)
            free = frozenset(self._plan.apart_functions)
            undo.enter_context(RowFunctions(lambda: self._whole or self._inside, self._group_norm, self._convolve, free))
            yield

    def _hook(self, module: nn.Module, parent: nn.Module, undo: contextlib.ExitStack) -> None:
        if type(module).__name__ in self._plan.whole:
            _replace(module, "forward", self._on_the_whole_frame(module.forward), undo)
        elif type(module).__name__ in self._plan.apart:
            _replace(module, "forward", self._apart(module.forward), undo)
        elif isinstance(module, _CONVOLUTIONS):
            added = self._plan.rows_added(parent) if module.kernel_size[-2] > 1 else (0, 0)
            _replace(module, "_conv_forward", self._on_a_band(module, added), undo)
        elif isinstance(module, _PADS):
            undo.callback(module.register_forward_hook(self._remember_padding).remove)

    # -- what mixes rows -----------------------------------------------------------------

    def _on_a_band(self, conv: Any, added: tuple[int, int]) -> Callable[..., Tensor]:
        """The convolution itself, after the module's own code has padded and joined the frames in time."""
        original = conv._conv_forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            rows = conv_rows(conv, self._added_before(added))

            def without_padding(y: Tensor) -> Tensor:
                with unpadded_rows(conv):
                    return original(y, *args, **kwargs)

            return self._convolved(lambda y: original(y, *args, **kwargs), x, rows, without_padding)

        return forward

    def _convolve(self, compute: Compute, x: Tensor, named: dict[str, Any]) -> Tensor:
        """A convolution that is no module's."""
        kernel, stride, dilation, padding = (
            named["weight"].size(-2),
            *(value if isinstance(value := named.get(name, default), int) else value[-2] for name, default in _DEFAULTS),
        )
        return self._convolved(compute, x, ConvRows(kernel, stride, dilation, padding, self._added_before((0, 0))))

    def _added_before(self, added: tuple[int, int]) -> tuple[int, int]:
        """Rows that the host has added to the frame for the convolution that begins now."""
        given, self._added = (self._added if self._added != (0, 0) else added), (0, 0)
        return given

    def _apart(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Code that keeps rows apart: it calls what it likes."""

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            before, self._inside = self._inside, True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = before

        return forward

    def _convolved(self, compute: Compute, x: Tensor, rows: ConvRows, without_padding: Compute | None = None) -> Tensor:
        if self._whole or self._inside:
            return compute(x)
        self._inside = True
        try:
            return compute(x) if rows.is_local else self._with_neighbours(compute, x, rows, without_padding)
        finally:
            self._inside = False

    def _with_neighbours(self, compute: Compute, x: Tensor, rows: ConvRows, without_padding: Compute | None) -> Tensor:
        self._enter_call()
        over, under = rows.added
        own = x.narrow(-2, over, x.size(-2) - over - under)
        bands, rank = self._at(own), self._exchange.rank
        results, rest = divmod(own.size(-2), rows.stride)
        if rest:
            raise SPError(f"A convolution with stride {rows.stride} got {own.size(-2)} rows on rank {rank}, which do not divide")
        arriving = self._exchange.halo(own, bands, rows.above, rows.below)
        # in a high band the few rows at its edges are computed anew: joining the halo to the band would copy all of it
        parts = edges(rows, own.size(-2)) if min(bands.counts) >= HIGH else None
        if parts is None:
            return self._extended(x, own, arriving(), rows).results(compute, 0, results, without_padding)
        output = compute(x).narrow(-2, 0, results)
        extended, (upper, lower), (start, stop) = self._extended(x, own, arriving(), rows), parts, bands.range(rank)
        if start and upper:
            output[..., :upper, :] = extended.results(compute, 0, upper, without_padding)
        if stop < bands.height and lower:
            output[..., results - lower :, :] = extended.results(compute, results - lower, results, without_padding)
        return output

    def _extended(self, x: Tensor, own: Tensor, halo: tuple[Tensor, Tensor], rows: ConvRows) -> Extended:
        (over, under), (above, below) = rows.added, halo
        bands, rank = self._at(own), self._exchange.rank
        start, stop = bands.range(rank)
        if rows.added == (0, 0):
            return Extended(above, own, below, rows)
        # the host has padded this band as if it were the frame, which is right at the borders of the frame only
        if (start and above.size(-2) < rows.above) or (stop < bands.height and below.size(-2) < rows.below):
            raise SPError(f"Rank {rank} needs more rows of a frame that is padded outside the convolution than its neighbours have")
        top = above if start else x.narrow(-2, 0, over)
        bottom = below if stop < bands.height else x.narrow(-2, over + own.size(-2), under)
        return Extended(top, own, bottom, rows)

    def _remember_padding(self, module: Any, args: Any, output: Any) -> None:
        if not self._whole:
            over, under = tuple(module.padding)[2:4]
            self._added = (int(over), int(under))

    def _group_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        self._enter_call()
        return group_norm(self._exchange.every_rank, *args, **kwargs)

    def _on_the_whole_frame(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._whole:
                return original(x, *args, **kwargs)
            self._enter_call()
            bands = self._at(x)
            self._whole = True
            try:
                output = original(self._exchange.all_rows(x, bands), *args, **kwargs)
            finally:
                self._whole = False
            start, stop = bands.range(self._exchange.rank)
            return output[..., start:stop, :].contiguous()

        return forward

    def _agreed_on(self, original: Callable[..., int]) -> Callable[..., int]:
        """As many bytes for each row of the latent on every rank, so that all cut the frames into the same chunks.

        They are those that one device with the least memory would take: a band is a part of the frame, so a chunk of as many bytes
        would have more frames than one device's, and a rank's memory would not shrink with its band.
        """

        def chunk_size(*args: Any, **kwargs: Any) -> int:
            self._enter_call()
            own = torch.tensor([original(*args, **kwargs)], device=self._device)
            of_the_frame = int(self._exchange.every_rank(own).min())
            return max(1, of_the_frame // self._bands.height) * self._bands.counts[self._exchange.rank]

        return chunk_size

    def _at(self, own: Tensor) -> Bands:
        """The bands at the resolution of this rank's rows."""
        rank = self._exchange.rank
        factor, rest = divmod(own.size(-2), self._bands.counts[rank])
        if rest or not factor:
            latent = self._bands.counts[rank]
            raise SPError(f"Rank {rank} has {own.size(-2)} rows where its band has {latent} rows of the latent, which do not divide")
        return self._bands.scaled(factor)


def _unlimited(vae: nn.Module, name: str, undo: contextlib.ExitStack) -> None:
    """Take a plan's limit away: from a function of the VAE's Python module, or from an attribute of its modules."""
    functions = sys.modules[type(vae).__module__]
    if hasattr(functions, name):
        _replace(functions, name, lambda: math.inf, undo)
    for module in vae.modules():
        if name in module.__dict__:
            _replace(module, name, math.inf, undo)


def _replace(module: Any, name: str, value: Any, undo: contextlib.ExitStack) -> None:
    """Set an attribute of one module, of torch or of Python, and what it had by its class or by itself afterwards."""
    if name in module.__dict__:
        undo.callback(module.__dict__.__setitem__, name, module.__dict__[name])
    else:
        undo.callback(module.__dict__.pop, name, None)
    module.__dict__[name] = value
