"""Which transport a group of ranks uses: decided alike on every rank, tried, and verified before anything relies on it."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import shard_range
from .agree import all_gather_bytes, all_gather_ints
from .collective import CollectiveTransport
from .errors import ExchangeError, TransportUnavailable
from .extension import load_cpu, load_cuda
from .peer import PeerTransport
from .shm import ShmTransport
from .staged import StagedTransport
from .transport import DEFAULT_TIMEOUT_S, Transport

log = logging.getLogger(__name__)

#: fastest first
CPU_ORDER = ("shm", "gloo")
CUDA_ORDER = ("peer", "nccl", "staged-shm", "staged-gloo")
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
class Decision:
    """Transports in the order to try, and why faster ones are not among them."""

    order: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


def decide(facts: Sequence[Facts]) -> Decision:
    """What the ranks of a group can try, from everybody's facts, so that every rank decides the same."""
    kinds = {fact.device for fact in facts}
    refused: dict[str, str] = {}
    if len(facts) == 1:
        return Decision(("local",), ())
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
    return Decision(possible, tuple((name, refused[name]) for name in order if name in refused))


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
        "gloo": lambda: CollectiveTransport(group),
        "nccl": lambda: CollectiveTransport(group),
        "shm": lambda: ShmTransport.create(group, directory=directory, timeout_s=limit, should_abort=should_abort),
        "peer": lambda: PeerTransport.create(group, timeout_s=limit, should_abort=should_abort),
        "staged-gloo": lambda: StagedTransport(CollectiveTransport(group)),
        "staged-shm": lambda: StagedTransport(ShmTransport.create(group, directory=directory, timeout_s=limit, should_abort=should_abort)),
    }
    plain = next((name for name in PLAIN if name in decision.order), None)
    for name in decision.order:
        try:
            transport = makers[name]()
        except TransportUnavailable as error:
            skipped.append(f"{name}: {error}")
            continue
        except RuntimeError as error:
            # not foreseen, so it comes from what all ranks share (driver, compiled part): a slower transport is better than none
            log.warning("the %s transport failed while it was set up", name, exc_info=True)
            skipped.append(f"{name}: {error}")
            continue
        verified = plain is not None and name not in (*PLAIN, "local")
        problem = verify(transport, makers[plain](), group, device) if verified and plain else ""
        if problem:
            transport.close()
            skipped.append(f"{name}: {problem}")
            continue
        reason = explain(transport.name, len(everybody), skipped, verified=verified)
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
        no_peer = load_cuda().reason
    return Facts(
        device=device.type,
        machine=_machine(),
        gpu=gpu,
        backends=_backends(group),
        no_shm=load_cpu().reason,
        no_peer=no_peer,
    )


def verify(transport: Transport, plain: Transport, group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Runs the first exchanges of a transport and the same through ``plain``; what differs, or "". Collective.

    Token and head counts do not divide, element sizes differ, and memory is reused between the cases.
    """
    fault, mine = "", []
    started = time.monotonic()
    try:
        mine = _first_exchanges(transport, device)
        transport.check()
    except (ExchangeError, RuntimeError) as error:
        fault = str(error)
    faults = all_gather_bytes(group, fault.encode())
    for rank, text in enumerate(faults):
        if text:
            return f"the first exchange failed on rank {rank}: {text.decode(errors='replace')}"
    wanted = _first_exchanges(plain, device)
    same = all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(mine, wanted, strict=True))
    wrong = [rank for rank, (flag,) in enumerate(all_gather_ints(group, [same])) if not flag]
    log.debug("verified %s in %.3f s", transport.name, time.monotonic() - started)
    return f"wrong data on rank {wrong[0]}" if wrong else ""


def _first_exchanges(transport: Transport, device: torch.device) -> list[Tensor]:
    rank, world_size = transport.rank, transport.world_size
    outputs = []
    for number, (dtype, H, D) in enumerate(((torch.float32, 2 * world_size + 1, 5), (torch.bfloat16, world_size, 64), (torch.uint8, 1, 3))):
        counts = [(3 + 2 * number + r) % 5 for r in range(world_size)]
        generator = torch.Generator().manual_seed(1000 * number + rank)
        size = (3, 2, counts[rank], H, D * dtype.itemsize)
        shards = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).to(device).view(dtype).unbind(0)
        low, high = shard_range(H, world_size, rank)
        outputs += transport.scatter_heads(shards, counts)
        whole = transport.all_gather_tokens(shards[0], counts)
        outputs += [whole, transport.gather_heads(whole[:, :, low:high], H, counts)]
    return [tensor.clone() for tensor in outputs]


def _machine() -> str:
    """Equal for processes of one boot that can name each other by process number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename


def _backends(group: dist.ProcessGroup | None) -> str:
    return str(dist.get_backend(group) if group is not None or dist.is_initialized() else "")
