"""Which transport a group of ranks uses: decided alike on every rank, tried, and verified before anything relies on it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ..settings import stall_timeout_s
from .errors import ExchangeError, TransportUnavailable
from .registry import LOCAL, TRANSPORTS, Facts, TransportRow, TransportSpec
from .small_collectives import all_gather_bytes
from .transport import Transport
from .trial import portion, trial
from .verified import VerifiedTransport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransportOrder:
    """Transports in the order to try, and why faster ones are not among them."""

    order: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


def decide(facts: Sequence[Facts], rows: Sequence[TransportRow] = TRANSPORTS) -> TransportOrder:
    """What the ranks of a group can try, from everybody's facts, so that every rank decides the same."""
    if len(facts) == 1:
        return TransportOrder((LOCAL.name,), ())
    devices = {fact.device for fact in facts}
    reasons = {row.name: row.refusal(facts) for row in rows if row.moves(devices)}
    return TransportOrder(
        tuple(name for name, reason in reasons.items() if not reason),
        tuple((name, reason) for name, reason in reasons.items() if reason),
    )


def make_transport(
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    *,
    directory: str | Path | None,
    timeout_s: float | None = None,
    should_abort: Callable[[], str | None] | None = None,
    rows: Sequence[TransportRow] = TRANSPORTS,
    trial_bytes: int | None = None,
) -> tuple[Transport, str]:
    """The fastest transport that works for ``group``, verified bit-exact now and as it grows, and one sentence why it is this one.

    Collective over ``group``; every rank gets the same kind.

    Args:
        device: where the tensors to exchange will be.
        directory: private directory (0700) that all ranks of the group see; several groups may share it.
        timeout_s: seconds that a wait for other ranks may last; :func:`sp_core.settings.stall_timeout_s` by default.
        should_abort: asked during waits, on CUDA from another thread; a text that it returns ends the wait as an
            :class:`ExchangeError` with that text.
        rows: the transports to choose from, the fastest first.
        trial_bytes: what each rank receives in the trial of a transport, at least; None: as :func:`.trial.trial` says; 0: nothing
            is verified, which is for tests that show what would come of it.

    Raises:
        ExchangeError: no transport delivers the right bytes.
    """
    device = torch.device(device)
    spec = TransportSpec(group, device, directory, stall_timeout_s() if timeout_s is None else timeout_s, should_abort)
    everybody = all_gather_facts(group, device, rows)
    decision = decide(everybody, rows)
    if decision.order == (LOCAL.name,):
        return LOCAL.make(spec), "local, each rank has all tokens"
    search = _Search(spec, [row for row in rows if row.name in decision.order], decision.refused, trial_bytes)
    transport = search.following()
    reason = search.reason(transport.name)
    log.info("exchange between %d ranks: %s", len(everybody), reason)
    if trial_bytes == 0:
        return transport, reason
    return VerifiedTransport(transport, group, device, portion(device, trial_bytes), search.after), reason


class _Search:
    """The transports that are left to try, the fastest first, and why others cannot be used. The same on every rank."""

    def __init__(
        self, spec: TransportSpec, rows: Sequence[TransportRow], refused: Sequence[tuple[str, str]], trial_bytes: int | None
    ) -> None:
        self._spec, self._left, self._trial_bytes = spec, list(rows), trial_bytes
        self._problems = [f"{name}: {why}" for name, why in refused]
        self._working: dict[str, Transport] = {}  # made and tried, not used yet
        # a stock collective takes over where another transport has no memory; not all work: nccl, for one, fails where
        # /dev/shm is too small for it
        plain = next((row for row in rows if row.plain and self._works(row)), None)
        if plain is not None:
            self._spec = replace(spec, plain=partial(plain.make, spec))

    def following(self) -> Transport:
        """The next transport that works. Collective.

        Raises:
            ExchangeError: none is left.
        """
        while self._left:
            row = self._left.pop(0)
            if self._works(row):
                return self._working.pop(row.name)
        raise ExchangeError(f"no transport works between these ranks: {'; '.join(self._problems)}")

    def after(self, problem: str) -> Transport:
        """What takes over from a transport that cannot be used any more. Collective."""
        self._problems.append(problem)
        transport = self.following()
        log.warning("exchange from now on: %s", self.reason(transport.name))
        return transport

    def reason(self, name: str) -> str:
        """One sentence for the log, the report and ``doctor``: why the transport ``name`` is used."""
        return f"{name}, verified" + (f" (not {'; not '.join(self._problems)})" if self._problems else "")

    def _works(self, row: TransportRow) -> bool:
        if row.name in self._working:
            return True
        transport, problem = _made(row, self._spec)
        if transport is not None and self._trial_bytes != 0:
            problem = trial(transport, self._spec.group, self._spec.device, self._trial_bytes)
            if problem:
                transport.close()
        if problem or transport is None:
            self._problems.append(f"{row.name}: {problem}")
            self._left = [other for other in self._left if other is not row]
            return False
        transport.after_trial()
        self._working[row.name] = transport
        return True


def _made(row: TransportRow, spec: TransportSpec) -> tuple[Transport | None, str]:
    try:
        return row.make(spec), ""
    except TransportUnavailable as error:
        return None, str(error)
    except RuntimeError as error:
        # not foreseen, so it comes from what all ranks share (driver, compiled part): a slower transport is better than none
        log.warning("the %s transport failed while it was set up", row.name, exc_info=True)
        return None, str(error)


def all_gather_facts(group: dist.ProcessGroup | None, device: torch.device, rows: Sequence[TransportRow] = TRANSPORTS) -> list[Facts]:
    """The facts of every rank of ``group``, in rank order. Collective."""
    mine = json.dumps(asdict(facts_of(group, device, rows))).encode()
    return [Facts(**json.loads(text)) for text in all_gather_bytes(group, mine)]


def facts_of(group: dist.ProcessGroup | None, device: torch.device, rows: Sequence[TransportRow] = TRANSPORTS) -> Facts:
    """What this rank can do; builds the compiled part that its device needs."""
    gpu = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = str(getattr(properties, "uuid", device.index))
    reasons = {row.name: row.lacks() for row in rows if row.lacks is not None and row.moves({device.type})}
    return Facts(
        device=device.type,
        host_id=host_id(),
        gpu=gpu,
        backends=str(dist.get_backend(group)) if group is not None or dist.is_initialized() else "",
        lacks={name: reason for name, reason in reasons.items() if reason},
    )


def host_id() -> str:
    """Equal for processes of one boot that can name each other by process number, which sharing memory takes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename
