"""All transports, a row for each: where it works, what it needs, and how it is made.

A transport of CPU tensors needs no second row for devices: moved through main memory
(:class:`~.transports.staged.StagedTransport`) it is one of their transports too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from ..settings import DEFAULT_STALL_TIMEOUT_S
from .native import gpu
from .native.build import load_cpu
from .transport import Transport
from .transports.collective import CollectiveTransport
from .transports.peer import PeerTransport
from .transports.shm import ShmTransport
from .transports.slow import SlowTransport
from .transports.staged import StagedTransport

#: a trial that lasts longer has failed: peer writes that a mainboard maps and then drops never arrive
TRIAL_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Facts:
    """What one rank knows about itself."""

    device: str  #: type of its device: "cpu", "cuda", ...
    machine_id: str  #: equal for processes that can share memory
    gpu: str = ""  #: which GPU, where there is one
    backends: str = "gloo"  #: of the process group
    #: name of a transport -> why this rank cannot take part in it
    lacks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TransportSpec:
    """What a transport is made from: arguments of :func:`sp_core.comm.choice.make_transport`, and what it found out."""

    group: dist.ProcessGroup | None
    device: torch.device
    directory: str | Path | None = None
    timeout_s: float = DEFAULT_STALL_TIMEOUT_S
    should_abort: Callable[[], str | None] | None = None
    #: makes the plain collective that was found to work, if one was
    plain: Callable[[], Transport] | None = None


@dataclass(frozen=True)
class TransportRow:
    """One transport. Where two of :data:`TRANSPORTS` are equally fast the earlier one is taken."""

    name: str
    #: type of device whose tensors it moves; "accelerator": whatever the process group's device backend moves
    device: Literal["cpu", "cuda", "accelerator"]
    #: collective; may raise TransportUnavailable on all ranks alike
    make: Callable[[TransportSpec], Transport]
    #: from everybody's facts, why these ranks cannot use it, or ""; the first reason counts
    needs: tuple[Callable[[Sequence[Facts]], str], ...] = ()
    #: asked on each rank: why this rank cannot take part, or ""; builds the compiled part where there is one
    lacks: Callable[[], str] | None = None
    #: a stock collective: the first of these that works takes over where another transport has no memory
    plain: bool = False
    #: used only where no other row works: not worth the time to measure it
    spare: bool = False

    def moves(self, devices: Collection[str]) -> bool:
        """Whether it moves the tensors of ranks on these types of device."""
        return set(devices) == {self.device} if self.device != "accelerator" else set(devices) != {"cpu"}

    def refusal(self, facts: Sequence[Facts]) -> str:
        """Why these ranks cannot use it, or ""."""
        for need in self.needs:
            if reason := need(facts):
                return reason
        return next((f"rank {rank}: {fact.lacks[self.name]}" for rank, fact in enumerate(facts) if self.name in fact.lacks), "")


def one_machine(facts: Sequence[Facts]) -> str:
    far = next((rank for rank, fact in enumerate(facts) if fact.machine_id != facts[0].machine_id), None)
    return "" if far is None else f"rank {far} is on another machine than rank 0, or in another container"


def has_device_backend(facts: Sequence[Facts]) -> str:
    if not all(any(name in fact.backends for name in ("nccl", "xccl")) for fact in facts):
        return "the process group has no device backend"
    gpus = {(fact.machine_id, fact.gpu) for fact in facts}
    return "two ranks share a GPU" if len(gpus) < len(facts) else ""


def gloo_backend(facts: Sequence[Facts]) -> str:
    return "" if all("gloo" in fact.backends for fact in facts) else "the process group has no gloo backend"


def cpu_library() -> str:
    return load_cpu().reason


def cuda_library() -> str:
    # NCCL_P2P_DISABLE is what people set on machines whose GPUs cannot write to each other's memory
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"
    return gpu.unusable()


def make_device_collective(spec: TransportSpec) -> Transport:
    return CollectiveTransport(spec.group)


def make_gloo(spec: TransportSpec) -> Transport:
    return CollectiveTransport(spec.group, "gloo")


def make_shm(spec: TransportSpec) -> Transport:
    return ShmTransport.create(spec.group, directory=spec.directory, timeout_s=spec.timeout_s, should_abort=spec.should_abort)


def make_peer(spec: TransportSpec) -> Transport:
    return PeerTransport.create(
        spec.group, timeout_s=spec.timeout_s, trial_timeout_s=TRIAL_TIMEOUT_S, should_abort=spec.should_abort, plain=spec.plain
    )


def staged(row: TransportRow) -> TransportRow:
    """The row of a transport of CPU tensors, as one for devices that goes through main memory."""

    def make_staged(spec: TransportSpec) -> Transport:
        return StagedTransport(row.make(spec))

    return replace(row, name=f"staged-{row.name}", device="accelerator", make=make_staged, spare=True)


def slowed(row: TransportRow, bandwidth: float, latency_s: float = 0.0) -> TransportRow:
    """The row of a transport behind a link that is slow on purpose: see :class:`~.transports.slow.SlowTransport`."""

    def make_slow(spec: TransportSpec) -> Transport:
        return SlowTransport(row.make(spec), bandwidth, latency_s)

    return replace(row, name=f"slow-{row.name}", make=make_slow)


#: a rank alone
LOCAL = TransportRow("local", "accelerator", make_device_collective, plain=True)

#: each moves the tensors from where they are, without a detour through main memory
UNSTAGED = (
    TransportRow("shm", "cpu", make_shm, needs=(one_machine,), lacks=cpu_library),
    TransportRow("peer", "cuda", make_peer, needs=(one_machine,), lacks=cuda_library),
    TransportRow("nccl", "accelerator", make_device_collective, needs=(has_device_backend,), plain=True),
    TransportRow("gloo", "cpu", make_gloo, needs=(gloo_backend,), plain=True),
)
TRANSPORTS = (*UNSTAGED, *(staged(row) for row in UNSTAGED if row.device == "cpu"))
#: for few exchanges that are large: on a device nothing receives them but the tensors that come, which go again. The peer exchange
#: keeps buffers, and is only used where all would go through main memory without it
WITHOUT_BUFFERS = (
    *(row for row in UNSTAGED if row.make is not make_peer),
    *(replace(row, spare=True) for row in UNSTAGED if row.make is make_peer),
    *(row for row in TRANSPORTS if row not in UNSTAGED),
)
