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

from .errors import ExchangeError, TransportUnavailable
from .native.build import load_cpu, load_cuda
from .small_collectives import all_gather_bytes
from .transport import DEFAULT_TIMEOUT_S, Transport
from .transports.collective import CollectiveTransport
from .transports.peer import PeerTransport
from .transports.shm import ShmTransport
from .transports.staged import StagedTransport
from .trial import compared, tried

log = logging.getLogger(__name__)

#: fastest first
CPU_ORDER = ("shm", "gloo")
CUDA_ORDER = ("peer", "nccl", "staged-shm", "staged-gloo")
#: a trial that lasts longer has failed: peer writes that a mainboard maps and then drops never arrive
TRIAL_TIMEOUT_S = 20.0
#: stock collectives: what the others are verified against, the fastest first
PLAIN = ("nccl", "gloo", "staged-gloo")


@dataclass(frozen=True)
class Facts:
    """What one rank knows about itself; reasons are empty where a thing is possible."""

    device: str  #: "cpu", "cuda", ...
    machine: str  #: equal for processes that can share memory
    gpu: str = ""  #: which GPU, where there is one
    backends: str = "gloo"  #: of the process group
    no_shm: str = ""
    no_peer: str = ""


@dataclass(frozen=True)
class TransportOrder:
    """Transports in the order to try, and why faster ones are not among them."""

    order: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


def decide(facts: Sequence[Facts]) -> TransportOrder:
    """What the ranks of a group can try, from everybody's facts, so that every rank decides the same."""
    kinds = {fact.device for fact in facts}
    refused: dict[str, str] = {}
    if len(facts) == 1:
        return TransportOrder(("local",), ())
    if kinds == {"cpu"}:
        order: tuple[str, ...] = CPU_ORDER
    elif kinds == {"cuda"}:
        order = CUDA_ORDER
    else:
        order = ("nccl", "staged-shm", "staged-gloo")
    far = next((rank for rank, fact in enumerate(facts) if fact.machine != facts[0].machine), None)
    if far is not None:
        elsewhere = f"rank {far} is on another machine than rank 0, or in another container"
        refused |= dict.fromkeys(("shm", "staged-shm", "peer"), elsewhere)
    for name, attribute in (("shm", "no_shm"), ("staged-shm", "no_shm"), ("peer", "no_peer")):
        lacking = next((rank for rank, fact in enumerate(facts) if getattr(fact, attribute)), None)
        if lacking is not None:
            refused.setdefault(name, f"rank {lacking}: {getattr(facts[lacking], attribute)}")
    gpus = [(fact.machine, fact.gpu) for fact in facts]
    if not all(any(name in fact.backends for name in ("nccl", "xccl")) for fact in facts):
        refused["nccl"] = "the process group has no device backend"
    elif len(set(gpus)) < len(gpus):
        refused["nccl"] = "two ranks share a GPU"
    if not all("gloo" in fact.backends for fact in facts):
        refused |= {"staged-gloo": "the process group has no gloo backend", "gloo": "the process group has no gloo backend"}
    possible = tuple(name for name in order if name not in refused)
    return TransportOrder(possible, tuple((name, refused[name]) for name in order if name in refused))


def make_transport(
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    *,
    directory: str | Path | None,
    timeout_s: float | None = None,
    should_abort: Callable[[], str | None] | None = None,
) -> tuple[Transport, str]:
    """The fastest transport that works for ``group``, verified bit-exact, and one sentence why it is this one.

    Collective over ``group``; every rank gets the same kind.

    Args:
        device: where the tensors to exchange will be.
        directory: private directory (0700) that all ranks of the group see; several groups may share it.
        timeout_s: how long a wait for other ranks may last; ``SP_TIMEOUT_S`` or 600 s by default.
        should_abort: asked during waits, on CUDA from another thread; a text that it returns ends the wait as an
            :class:`ExchangeError` with that text.

    Raises:
        ExchangeError: no transport delivers the right bytes.
    """
    device = torch.device(device)
    limit = float(os.environ.get("SP_TIMEOUT_S") or DEFAULT_TIMEOUT_S) if timeout_s is None else timeout_s
    everybody = [Facts(**json.loads(text)) for text in all_gather_bytes(group, json.dumps(asdict(facts_of(group, device))).encode())]
    decision = decide(everybody)
    skipped = [f"{name}: {why}" for name, why in decision.refused]
    makers: dict[str, Callable[[], Transport]] = {
        "local": lambda: CollectiveTransport(group),
        "gloo": lambda: CollectiveTransport(group, "gloo"),
        "nccl": lambda: CollectiveTransport(group),
        "shm": lambda: ShmTransport.create(group, directory=directory, timeout_s=limit, should_abort=should_abort),
        "peer": lambda: PeerTransport.create(
            group, timeout_s=min(limit, TRIAL_TIMEOUT_S), should_abort=should_abort, plain=makers.get(plain)
        ),
        "staged-gloo": lambda: StagedTransport(CollectiveTransport(group, "gloo")),
        "staged-shm": lambda: StagedTransport(ShmTransport.create(group, directory=directory, timeout_s=limit, should_abort=should_abort)),
    }
    order = list(decision.order)
    plain, wanted = "", None
    for name in [name for name in PLAIN if name in order]:
        reference = makers[name]()
        outputs, problem = tried(reference, group, device)
        if not problem:
            plain, wanted = name, outputs
            break
        # nccl, for one, fails where /dev/shm is too small for it
        reference.close()
        order.remove(name)
        skipped.append(f"{name}: {problem}")
    for name in order:
        try:
            transport = reference if name == plain else makers[name]()
        except TransportUnavailable as error:
            skipped.append(f"{name}: {error}")
            continue
        except RuntimeError as error:
            # not foreseen, so it comes from what all ranks share (driver, compiled part): a slower transport is better than none
            log.warning("the %s transport failed while it was set up", name, exc_info=True)
            skipped.append(f"{name}: {error}")
            continue
        own = name not in (plain, "local")
        problem = compared(transport, wanted, group, device) if own else ""
        if problem:
            transport.close()
            skipped.append(f"{name}: {problem}")
            continue
        if isinstance(transport, PeerTransport):
            transport.timeout_s = limit
        reason = explain(transport.name, len(everybody), skipped, verified=own and wanted is not None)
        log.info("exchange between %d ranks: %s", len(everybody), reason)
        return transport, reason
    raise ExchangeError(f"no transport works between these {len(everybody)} ranks: {'; '.join(skipped)}")


def explain(name: str, world_size: int, skipped: Sequence[str], *, verified: bool) -> str:
    """One sentence for the log and for ``doctor``."""
    if world_size == 1:
        return "local, each rank has all tokens"
    checked = ", verified against the plain collective" if verified else ""
    return f"{name}{checked}" + (f" (not {'; not '.join(skipped)})" if skipped else "")


def facts_of(group: dist.ProcessGroup | None, device: torch.device) -> Facts:
    """What this rank can do; builds the compiled part that its device needs."""
    gpu, no_peer = "", ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = str(getattr(properties, "uuid", device.index))
        no_peer = _switched_off() or load_cuda().reason
    return Facts(
        device=device.type,
        machine=_machine(),
        gpu=gpu,
        backends=_backends(group),
        no_shm=load_cpu().reason,
        no_peer=no_peer,
    )


def _switched_off() -> str:
    """Who turned direct writes off for NCCL did so because they do not work on that machine."""
    return "NCCL_P2P_DISABLE is set" if os.environ.get("NCCL_P2P_DISABLE", "0") != "0" else ""


def _machine() -> str:
    """Equal for processes of one boot that can name each other by process number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename


def _backends(group: dist.ProcessGroup | None) -> str:
    return str(dist.get_backend(group) if group is not None or dist.is_initialized() else "")
