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
from torch import Tensor

from ..settings import stall_timeout_s
from .errors import ExchangeError, TransportUnavailable
from .registry import LOCAL, TRANSPORTS, Facts, TransportRow, TransportSpec
from .small_collectives import all_gather_bytes
from .transport import Transport
from .trial import compared, tried

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
) -> tuple[Transport, str]:
    """The fastest transport that works for ``group``, verified bit-exact, and one sentence why it is this one.

    Collective over ``group``; every rank gets the same kind.

    Args:
        device: where the tensors to exchange will be.
        directory: private directory (0700) that all ranks of the group see; several groups may share it.
        timeout_s: seconds that a wait for other ranks may last; :func:`sp_core.settings.stall_timeout_s` by default.
        should_abort: asked during waits, on CUDA from another thread; a text that it returns ends the wait as an
            :class:`ExchangeError` with that text.
        rows: the transports to choose from, the fastest first.

    Raises:
        ExchangeError: no transport delivers the right bytes.
    """
    device = torch.device(device)
    spec = TransportSpec(group, device, directory, stall_timeout_s() if timeout_s is None else timeout_s, should_abort)
    everybody = all_gather_facts(group, device, rows)
    decision = decide(everybody, rows)
    known = {row.name: row for row in (LOCAL, *rows)}
    candidates = [known[name] for name in decision.order]
    reference, problems = _find_reference([row for row in candidates if row.plain], spec)
    if reference is not None:
        spec = replace(spec, plain=partial(reference.row.make, spec))
    skipped = [f"{name}: {why}" for name, why in (*decision.refused, *problems.items())]
    for row in candidates:
        if row.name in problems:
            continue
        transport, problem = _verified(row, spec, reference)
        if transport is None:
            skipped.append(f"{row.name}: {problem}")
            continue
        verified = reference is not None and row is not reference.row
        reason = explain(transport.name, len(everybody), skipped, verified=verified)
        log.info("exchange between %d ranks: %s", len(everybody), reason)
        return transport, reason
    raise ExchangeError(f"no transport works between these {len(everybody)} ranks: {'; '.join(skipped)}")


@dataclass(frozen=True)
class _Reference:
    """A plain collective that works, and what it delivered in the trial: every other transport must deliver the same."""

    row: TransportRow
    transport: Transport
    outputs: list[Tensor]


def _find_reference(rows: Sequence[TransportRow], spec: TransportSpec) -> tuple[_Reference | None, dict[str, str]]:
    """The first plain collective that works, and why those before it do not. Collective.

    Not all work: nccl, for one, fails where /dev/shm is too small for it.
    """
    problems: dict[str, str] = {}
    for row in rows:
        transport, problem = _made(row, spec)
        if transport is not None:
            outputs, problem = tried(transport, spec.group, spec.device)
            if not problem:
                return _Reference(row, transport, outputs), problems
            transport.close()
        problems[row.name] = problem
    return None, problems


def _verified(row: TransportRow, spec: TransportSpec, reference: _Reference | None) -> tuple[Transport | None, str]:
    """The row's transport, if it delivers what the reference delivers, or why it cannot be used. Collective."""
    if reference is not None and row is reference.row:
        return reference.transport, ""
    transport, problem = _made(row, spec)
    if transport is None:
        return None, problem
    problem = compared(transport, None if reference is None else reference.outputs, spec.group, spec.device)
    if problem:
        transport.close()
        return None, problem
    transport.after_trial()
    return transport, ""


def _made(row: TransportRow, spec: TransportSpec) -> tuple[Transport | None, str]:
    try:
        return row.make(spec), ""
    except TransportUnavailable as error:
        return None, str(error)
    except RuntimeError as error:
        # not foreseen, so it comes from what all ranks share (driver, compiled part): a slower transport is better than none
        log.warning("the %s transport failed while it was set up", row.name, exc_info=True)
        return None, str(error)


def explain(name: str, world_size: int, skipped: Sequence[str], *, verified: bool) -> str:
    """One sentence for the log and for ``doctor``."""
    if world_size == 1:
        return "local, each rank has all tokens"
    checked = ", verified against the plain collective" if verified else ""
    return f"{name}{checked}" + (f" (not {'; not '.join(skipped)})" if skipped else "")


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
