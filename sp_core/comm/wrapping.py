"""A transport around another one: what it does not do itself, the inner one does."""

from __future__ import annotations

from typing import NoReturn

from .transport import Slots, Transport


class WrappingTransport(Transport):
    """Moves nothing by itself, so a subclass writes the three moves. It owns ``inner``."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.world_size)
        self.inner = inner
        self.max_tensors = inner.max_tensors

    @property
    def beside(self) -> bool:  # type: ignore[override]
        return self.inner.beside

    def reserve(self, size: int) -> Slots:
        return self.inner.reserve(size)

    def _finish(self) -> None:
        self.inner._finish()

    def _fail(self, error: Exception) -> NoReturn:
        self.inner._fail(error)

    def after_trial(self) -> None:
        self.inner.after_trial()

    def hold_little(self) -> None:
        self.inner.hold_little()

    def trim(self) -> None:
        self.inner.trim()

    def close(self) -> None:
        self.inner.close()
