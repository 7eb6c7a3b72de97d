"""The worker process: joins the groups, then answers one request after another.

A worker leaves when the coordinator says so, when the control group breaks, or when the
process that started it is gone, whatever it is doing at that moment (:mod:`.orphaned`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from . import wire
from .control import ControlGroup, Frame
from .errors import Cancelled, PeerFailed
from .orphaned import leave_orphaned
from .protocol import GROUP_TIMEOUT, Op, ReplyStatus
from .run_ahead import RunAheadLimit
from .shared_buffer import SharedBuffer
from .shared_state import Phase, RankState, SharedState

log = logging.getLogger(__name__)


@dataclass
class WorkerContext:
    """What a service knows of the pool that it runs in."""

    rank: int
    world_size: int
    device: torch.device
    shared_state: SharedState
    directory: Path
    run_ahead: RunAheadLimit
    request: int = 0
    #: blocks that this rank has entered in this request
    blocks_entered: int = 0

    @property
    def own_state(self) -> RankState:
        """What this rank shows of itself to all processes."""
        return self.shared_state.ranks[self.rank]

    def begin(self, request: int) -> None:
        """The rank starts on a request."""
        self.request, self.blocks_entered = request, 0
        self.own_state.begin()

    def show(self, phase: Phase, block: int = 0, blocks: int = 0) -> None:
        self.own_state.show(phase, block, blocks)

    def enter_block(self, block: int, blocks: int) -> None:
        """Between two blocks: show progress, and stop where all ranks do.

        Args:
            block, blocks: which block of how many; a model may call them in any order.

        Raises:
            Cancelled: the user cancelled; on every rank at the same block.
            PeerFailed: another rank failed meanwhile.
        """
        self.run_ahead.wait_before_block()
        self.show(Phase.COMPUTING, block, blocks)
        self.enter_collective()
        self.shared_state.enter_block(self.rank, self.request, self.blocks_entered)
        self.blocks_entered += 1

    def enter_collective(self) -> None:
        """Say that this rank is about to wait for the others: who keeps them waiting is then known."""
        self.own_state.enter_collective()

    def cancelled(self) -> bool:
        """The user cancelled the request that this rank works on."""
        return self.shared_state.cancelled(self.request)

    def should_abort(self) -> str | None:
        """What a wait for a peer should raise, if it should end."""
        return str(PeerFailed()) if self.shared_state.aborted(self.request) else None


class Service(Protocol):
    """What a worker does with requests. ``handle`` runs on every rank; rank 0's value is the reply."""

    def __init__(self, context: WorkerContext, options: dict[str, Any]) -> None: ...

    def handle(self, operation: str, body: Any) -> Any: ...


def run(config: dict[str, Any], rank: int) -> None:
    """Life of a worker process."""
    directory = Path(config["directory"])
    if hasattr(signal, "SIGUSR1"):
        # The coordinator sends this signal to a rank that stands still, to learn where it stands.
        faulthandler.register(signal.SIGUSR1)
    logging.getLogger("sp_core").setLevel(config["log_level"])
    if not config["before_torch"]:
        # ComfyUI, which the function before torch brings in, sets up logging itself
        logging.basicConfig(format="%(message)s", stream=sys.stderr)
    world_size = len(config["devices"])
    kind = config["devices"][rank][0]
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, 0)
    if kind == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    else:
        torch.accelerator.set_device_index(0)
    shared_state = SharedState(SharedBuffer.attach(config["shared_state"]), world_size)
    context = WorkerContext(rank, world_size, device, shared_state, directory, RunAheadLimit(device))
    context.own_state.has_arrived = 1
    control = ControlGroup(directory, rank + 1, world_size + 1, config["start_timeout_s"])
    requests = SharedBuffer.attach(config["requests"])
    replies = SharedBuffer.attach(config["replies"][rank])
    control.send(0, Frame(ReplyStatus.READY, 0))
    _Worker(context, control, requests, replies, lambda: _make_service(config, context)).serve()


def _make_service(config: dict[str, Any], context: WorkerContext) -> Service:
    context.show(Phase.STARTING)
    store = dist.FileStore(str(context.directory / "data"), context.world_size)
    # NCCL asks the store when a group is first used, and the store has a time limit of its own.
    store.set_timeout(GROUP_TIMEOUT)
    dist.init_process_group(
        backend={"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}[context.device.type],
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=GROUP_TIMEOUT,
    )
    module, name = config["service"].split(":")
    return getattr(importlib.import_module(module), name)(context, config["service_options"])


class _Worker:
    def __init__(
        self, context: WorkerContext, control: ControlGroup, requests: SharedBuffer, replies: SharedBuffer, make: Callable[[], Service]
    ) -> None:
        self.context, self.control, self.requests, self.replies = context, control, requests, replies
        self._make = make
        self._service: Service | None = None
        self._stored: dict[int, torch.Tensor] = {}

    def serve(self) -> None:
        while True:
            try:
                frame = self.control.receive(0)
            except RuntimeError:
                leave_orphaned(self.context.directory)
            if frame.op == Op.SHUTDOWN:
                _leave()
            self.context.begin(frame.request)
            reply, status = self._answer(frame)
            self.context.show(Phase.IDLE)
            answer = _write(self.replies, Frame(status, frame.request), reply)
            try:
                self.control.send(0, answer)
            except RuntimeError:
                leave_orphaned(self.context.directory)

    def _answer(self, frame: Frame) -> tuple[wire.Encoded, ReplyStatus]:
        try:
            with torch.inference_mode():
                if self._service is None:
                    self._service = self._make()
                    self.context.show(Phase.COMPUTING)
                buffer = self.requests.buffer(frame.total_bytes)
                operation, body, forget = wire.unpack(buffer, frame.header_bytes, self.context.device, self._stored)
                for name in forget:
                    self._stored.pop(name, None)
                value = self._service.handle(operation, body)
                if self.context.device.type != "cpu":
                    # An error of a kernel that is still queued would otherwise appear in the next request.
                    torch.accelerator.synchronize()
                # A value that cannot be sent is a failure of this request too, so it is encoded in here.
                return (wire.encode(value) if self.context.rank == 0 else wire.encode(None)), ReplyStatus.DONE
        except Cancelled:
            return wire.encode(None), ReplyStatus.CANCELLED
        except BaseException as error:
            log.error("request %d failed:\n%s", frame.request, traceback.format_exc())
            # Another rank's failure released this rank from its wait, and the waiting code raised an error of its own kind.
            kind = PeerFailed if self.context.should_abort() else type(error)
            report = {"message": sentence(error), "kind": kind.__name__, "fatal": device_lost(error)}
        # Memory is given back only here: until the except clause ends, the error's frames hold their tensors.
        if not report["fatal"] and self.context.device.type != "cpu":
            with contextlib.suppress(RuntimeError):
                getattr(torch, self.context.device.type).empty_cache()
            self.context.own_state.spare_bytes = 0
        return wire.encode(report), ReplyStatus.FAILED


def sentence(error: BaseException) -> str:
    """What a person is told of an error."""
    text = str(error).strip() or type(error).__name__
    first_line = text.splitlines()[0]
    if _out_of_device_memory(error):
        return f"out of memory on its device ({first_line}). Make the video smaller or shorter, or close what else uses it"
    if isinstance(error, MemoryError):
        return "out of main memory. Make the video smaller or shorter, or close other programs"
    if device_lost(error):
        return f"its device does not answer any more ({first_line}). Check the device and its driver; the next prompt starts a new pool"
    return text


def device_lost(error: BaseException) -> bool:
    """After such an error every later use of the device fails too, until the process is gone."""
    return _of_the_accelerator(error) and not _out_of_device_memory(error)


def _out_of_device_memory(error: BaseException) -> bool:
    """torch's allocator has a class for it; what the driver refuses to others (pinned memory) is error 2 of CUDA."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return _of_the_accelerator(error) and (getattr(error, "error_code", None) == 2 or "out of memory" in str(error).lower())


def _of_the_accelerator(error: BaseException) -> bool:
    kind = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)


def _write(buffer: SharedBuffer, frame: Frame, encoded: wire.Encoded) -> Frame:
    """Put a message's body into the buffer; returns the frame that announces it."""
    header, offsets, total = wire.pack(encoded.tree, [{} for _ in encoded.tensors], encoded.tensors)
    buffer.reserve(total)
    wire.write(buffer.buffer(total), header, offsets, encoded.tensors)
    return Frame(frame.op, frame.request, len(header), total)


def _leave() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's own end would wait for threads of ComfyUI that may still run, and nothing is left to save.
    os._exit(0)
