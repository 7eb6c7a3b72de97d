"""Which transport a group of ranks uses: decided alike on every rank, tried, and verified before anything relies on it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..settings import stall_timeout_s
from .fastest import RememberedTimes
from .registry import LOCAL, TRANSPORTS, Facts, TransportRow, TransportSpec
from .search import Search
from .small_collectives import all_gather_bytes
from .transport import Transport
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
    exchange_bytes: int | None = None,
    remembered: RememberedTimes | None = None,
) -> tuple[Transport, str]:
    """The fastest transport that works for ``group``, verified bit-exact now and as it grows, and one sentence why it is this one.

    Collective over ``group``; every rank gets the same kind.

    Args:
        device: where the tensors to exchange will be.
        directory: private directory (0700) that all ranks of the group see; several groups may share it.
        timeout_s: seconds that a wait for other ranks may last; :func:`sp_core.settings.stall_timeout_s` by default.
        should_abort: asked during waits, on CUDA from another thread; a text that it returns ends the wait as an
            :class:`ExchangeError` with that text.
        rows: the transports to choose from. All that work are timed, but for those that are ``spare``, which are used only where no
            other works. The first row that none beats by a margin is taken: 1.1 times, on CPU ranks 3 times (:mod:`.fastest`).
        trial_bytes: what each rank receives in the trial of a transport, at least; None: as :func:`.trial.trial` says; 0: nothing
            is verified or timed, which is for tests that show what would come of it.
        exchange_bytes: what each rank receives of q, k and v in the exchanges to come, if that is known; the same on all ranks.
        remembered: times that were measured for equal groups, and where new ones are put; all ranks must have the same.

    Raises:
        ExchangeError: no transport delivers the right bytes.
    """
    device = torch.device(device)
    spec = TransportSpec(group, device, directory, stall_timeout_s() if timeout_s is None else timeout_s, should_abort)
    everybody = all_gather_facts(group, device, rows)
    decision = decide(everybody, rows)
    if decision.order == (LOCAL.name,):
        return LOCAL.make(spec), "local, each rank has all tokens"
    search = Search(spec, [row for row in rows if row.name in decision.order], decision.refused, trial_bytes)
    if trial_bytes == 0:
        transport = search.following()
        return transport, search.reason(transport.name)
    search.order_by_time(exchange_bytes, {} if remembered is None else remembered)
    transport = search.following()
    reason = search.reason(transport.name)
    log.info("exchange between %d ranks: %s", len(everybody), reason)
    return VerifiedTransport(transport, group, device, search.after), reason


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
        machine_id=machine_id(),
        gpu=gpu,
        backends=str(dist.get_backend(group)) if group is not None or dist.is_initialized() else "",
        lacks={name: reason for name, reason in reasons.items() if reason},
    )


def machine_id() -> str:
    """Equal for processes of one boot that can name each other by process number, which sharing memory takes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename
