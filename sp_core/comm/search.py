"""Which of the transports that could move tensors here do, and which of those is the fastest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

import torch.distributed as dist

from .errors import ExchangeError, TransportUnavailable
from .fastest import MARGIN, MARGIN_CPU, RememberedTimes, exchange_seconds, figures, pick, timed_bytes
from .registry import TransportRow, TransportSpec
from .transport import Transport
from .trial import trial

log = logging.getLogger(__name__)


class Search:
    """The transports that are left to try, the fastest first, and why others cannot be used. The same on every rank."""

    def __init__(
        self, spec: TransportSpec, rows: Sequence[TransportRow], refused: Sequence[tuple[str, str]], trial_bytes: int | None
    ) -> None:
        self._spec, self._left, self._trial_bytes = spec, list(rows), trial_bytes
        self._problems = [f"{name}: {why}" for name, why in refused]
        self._working: dict[str, Transport] = {}  # made and tried, not used yet
        self._figures = ""
        # a stock collective takes over where another transport has no memory; not all work: nccl, for one, fails where
        # /dev/shm is too small for it
        plain = next((row for row in rows if row.plain and self._works(row)), None)
        if plain is not None:
            self._spec = replace(spec, plain=partial(plain.make, spec))

    def order_by_time(self, at_hand: int | None, remembered: RememberedTimes) -> None:
        """Puts the fastest of the transports that work first, and drops the others' memory. Collective.

        Args:
            at_hand: bytes that each rank receives in the exchanges to come, if that is known.
        """
        contenders = [row for row in self._left if not row.spare]
        contenders = [row for row in contenders if self._works(row)]
        if len(contenders) < 2:
            return
        size, group = timed_bytes(self._spec.device, at_hand), self._spec.group
        key = (tuple(dist.get_process_group_ranks(group)), tuple(row.name for row in contenders), size)
        if key not in remembered:
            remembered[key] = tuple(self._times(contenders, size).items())
        seconds = {name: taken for name, taken in remembered[key] if name in self._working}
        if not seconds:
            return
        self._figures = figures(seconds, size)
        first = pick(seconds, MARGIN_CPU if self._spec.device.type == "cpu" else MARGIN)
        self._left.sort(key=lambda row: (row.name != first, seconds.get(row.name, inf)))
        for name in [name for name in self._working if name != first]:
            self._working.pop(name).close()

    def _times(self, contenders: Sequence[TransportRow], size: int) -> dict[str, float]:
        """Row names and seconds. A transport that fails meanwhile has no time and is out."""
        seconds: dict[str, float] = {}
        for row in contenders:
            try:
                seconds[row.name] = exchange_seconds(self._working[row.name], self._spec.group, self._spec.device, size)
            except TransportUnavailable as error:
                self._dismiss(row, str(error))
        return seconds

    def following(self) -> Transport:
        """The next transport that works. Collective.

        Raises:
            ExchangeError: none is left.
        """
        while self._left:
            row = self._left.pop(0)
            if self._works(row):
                return self._working.pop(row.name)
        ranks = dist.get_world_size(self._spec.group)
        raise ExchangeError(f"no transport works between these {ranks} ranks: {'; '.join(self._problems)}")

    def after(self, problem: str) -> Transport:
        """What takes over from a transport that cannot be used any more. Collective."""
        self._problems.append(problem)
        transport = self.following()
        log.warning("exchange from now on: %s", self.reason(transport.name))
        return transport

    def reason(self, name: str) -> str:
        """One sentence for the log, the report and ``doctor``: why the transport ``name`` is used."""
        times = f"; {self._figures}" if self._figures else ""
        return f"{name}, verified{times}" + (f" (not {'; not '.join(self._problems)})" if self._problems else "")

    def _works(self, row: TransportRow) -> bool:
        if row.name in self._working:
            return True
        transport, problem = _made(row, self._spec)
        if transport is not None and self._trial_bytes != 0:
            problem = trial(transport, self._spec.group, self._spec.device, self._trial_bytes)
            if problem:
                transport.close()
        if problem or transport is None:
            self._dismiss(row, problem)
            return False
        transport.after_trial()
        self._working[row.name] = transport
        return True

    def _dismiss(self, row: TransportRow, problem: str) -> None:
        self._problems.append(f"{row.name}: {problem}")
        self._left = [other for other in self._left if other is not row]
        if row.name in self._working:
            self._working.pop(row.name).close()


def _made(row: TransportRow, spec: TransportSpec) -> tuple[Transport | None, str]:
    try:
        return row.make(spec), ""
    except TransportUnavailable as error:
        return None, str(error)
    except RuntimeError as error:
        # not foreseen, so it comes from what all ranks share (driver, compiled part): a slower transport is better than none
        log.warning("the %s transport failed while it was set up", row.name, exc_info=True)
        return None, str(error)
