"""Exchange between GPUs of one machine by direct writes into each other's memory.

Two ways to write: ``kernel`` (stores by the multiprocessors, the faster one over NVLink) and ``copy`` (strided copies by the
copy engines: over PCIe, stores are several times slower than those). Both are described in ``csrc/all2all_heads.cuh``.

With ``kernel`` the outputs are views of receive slots, lent until the last tensor is gone. They must be used on the stream
that was current at the call, or on one that waits for it, as usual for torch tensors. With ``copy`` everybody writes slots 0
and 1 in turn and outputs are copied out, which costs little where the link is slow.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...settings import DEFAULT_STALL_TIMEOUT_S, STALL_TIMEOUT
from ..errors import ExchangeError, TransportUnavailable, ranks_text
from ..native.addresses import MAX_WORLD, Exchange, ExchangeKind
from ..native.cuda import CLaunch, CStatus, CudaError
from ..native.gpu import GpuCalls, open_device
from ..small_collectives import all_gather_ints, raise_together
from ..transport import Slots, Transport
from .collective import CollectiveTransport
from .exchange_transport import ExchangeTransport, PreparedExchange
from .peer_memory import Lease, PeerMemory, Window, agree_on_exchange, rounded_slot, slot_count

log = logging.getLogger(__name__)

Method = Literal["kernel", "copy"]
#: how often is looked at what the kernels write
_STATUS_POLL_S = 0.05
_MOST_BLOCKS = 512
#: bytes that are worth a block of their own
_BLOCK_BYTES = 64 << 10
_FIRST_SLOT_BYTES = 8 << 20
#: exchanges, about those of one sampling run
_PATIENCE = 4096


class PeerTransport(ExchangeTransport):
    """Peer-memory exchange of CUDA tensors on the current device. Made by :meth:`create` on all ranks at once.

    Calls are asynchronous: a forward ends with :meth:`check`. A late or dead rank is found by a thread that watches the
    exchange under way; the error is raised by the next call, or by :meth:`check`.

    Where some rank has no memory for buffers as large as an exchange needs, that one and some thousand after it go through
    a plain collective; then, and after :meth:`trim`, there may be memory again.
    """

    device_type = "cuda"

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        method: Method | None = None,
        timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
        trial_timeout_s: float | None = None,
        should_abort: Callable[[], str | None] | None = None,
        plain: Callable[[], Transport] | None = None,
    ) -> PeerTransport:
        """Collective over ``group``. Without ``method`` both are measured and the faster one stays.

        Args:
            timeout_s: seconds after which an exchange that does not end is an error.
            trial_timeout_s: a smaller limit, until :meth:`after_trial`.
            should_abort: asked from another thread during an exchange; a text that it returns ends the exchange with that text.
            plain: makes what takes over where there is no memory to grow.

        Raises:
            TransportUnavailable: on every rank alike, if any rank cannot take part.
        """
        library, reason = None, ""
        if dist.get_world_size(group) > MAX_WORLD:
            reason = f"the peer exchange joins at most {MAX_WORLD} ranks"
        if not reason:
            try:
                library = open_device(torch.cuda.current_device())
                # what can fail on one rank alone fails here, where all hear of it
                library.multiprocessors()
                library.free_status(library.allocate_status()[0])
            except CudaError as error:
                reason = str(error)
        raise_together(group, reason and f"rank {dist.get_rank(group)}: {reason}")
        assert library is not None
        transport = cls(group, library, timeout_s=timeout_s, should_abort=should_abort, plain=plain)
        try:
            if trial_timeout_s is not None:
                transport.timeout_s = min(timeout_s, trial_timeout_s)
            transport._use(method or transport._faster_method())
        except BaseException:
            transport.close()
            raise
        return transport

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        library: GpuCalls,
        *,
        timeout_s: float,
        should_abort: Callable[[], str | None] | None,
        plain: Callable[[], Transport] | None = None,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.timeout_s = self._full_timeout_s = timeout_s
        self.should_abort = should_abort
        self.group = group
        self._library = library
        # ranks may run on different GPU models: a launch has the same number of blocks everywhere
        self._processors = min(count for (count,) in all_gather_ints(group, [library.multiprocessors()]))
        self._memory = PeerMemory(group, library, _FIRST_SLOT_BYTES)
        self._own_slot: int | None = None  # granted for the next exchange; None right after (re)allocation
        self._make_plain = plain or partial(CollectiveTransport, group)
        self._plain: Transport | None = None  # in use where there was no memory to grow
        self._again = 0  # the exchange at which growing is tried again
        self._made = 0  # how often the slots were made anew, or left
        self._watch = ExchangeWatch(library, self)
        self._use("kernel")

    def _use(self, method: Method) -> None:
        self.method: Method = method
        self.name = "peer" if method == "kernel" else "peer-copy"

    def after_trial(self) -> None:
        self.timeout_s = self._full_timeout_s

    def _finish(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._raise_if_failed()

    def trim(self) -> None:
        """Back to the smallest buffers; the next large exchange grows them anew. Collective."""
        if self._plain is None and self._memory.slot_bytes <= _FIRST_SLOT_BYTES:
            return
        self._raise_if_failed()
        try:
            self._replace_memory(_FIRST_SLOT_BYTES)
        except TransportUnavailable as error:
            self._fail(ExchangeError(str(error)))
        self._leave_plain()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        torch.cuda.synchronize(self._library.device)
        self._watch.close()
        self._memory.close()
        if self._plain is not None:
            self._plain.close()

    def _move(self, prepared: PreparedExchange, tensors: Sequence[Tensor]) -> list[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            raise ExchangeError(f"rank {self.rank}: an exchange cannot be captured in a CUDA graph; compile without graphs")
        self._raise_if_failed()
        self._make_room(prepared.largest_slot, prepared.signature, self._epoch)
        if self._plain is not None:
            return through(self._plain, prepared.exchange, tensors)
        launch = self._launch(prepared, tensors)
        stream = torch.cuda.current_stream().cuda_stream
        if self.method == "copy":
            launch.fixed_slot = self._epoch % 2
            self._library.copy(launch, stream)
            return self._copied_out(launch.fixed_slot, prepared)
        self._memory.reclaim()
        slot, launch.fixed_slot = (0, 0) if self._own_slot is None else (self._own_slot, -1)
        self._own_slot = launch.next_slot = self._memory.free.pop(0)
        self._library.push(launch, stream)
        if self._memory.free:
            return _views(self._memory.lend(slot), prepared)
        # tensors of earlier exchanges hold the other slots: this one is needed for the exchange after the next
        outputs = self._copied_out(slot, prepared)
        self._memory.free.append(slot)
        return outputs

    def _copied_out(self, slot: int, prepared: PreparedExchange) -> list[Tensor]:
        return [view.clone() for view in _views(self._memory.window(slot), prepared)]

    def _launch(self, prepared: PreparedExchange, tensors: Sequence[Tensor]) -> CLaunch:
        launch = CLaunch(
            exchange=prepared.native,
            rank=self.rank,
            blocks=block_count(prepared.exchange, self._processors),
            epoch=self._epoch,
            signature=zlib.crc32(prepared.signature),
            slot_bytes=self._memory.slot_bytes,
            status=self._watch.seen_by_device,
        )
        for index, tensor in enumerate(tensors):
            launch.sources[index] = tensor.data_ptr()
            launch.source_batch[index] = tensor.stride(0) * tensor.element_size()
            launch.source_token[index] = tensor.stride(1) * tensor.element_size()
        for rank, base in enumerate(self._memory.peers):
            launch.peers[rank] = base
        return launch

    def reserve(self, size: int) -> Slots:
        self._make_room(size, f"room for {size} bytes".encode(), self._epoch + 1)
        if self._plain is not None:
            return Slots(made=self._made)
        count = 2 if self.method == "copy" else slot_count(self._memory.slot_bytes)
        return Slots(count, self._memory.slot_bytes, self._made)

    def _make_room(self, need: int, signature: bytes, epoch: int) -> None:
        """For exchange number ``epoch``."""
        if self._plain is not None and epoch >= self._again:
            self._leave_plain()
        if self._plain is None and (self._memory.allocation is None or need > self._memory.slot_bytes):
            self._grow(need, signature)

    def _grow(self, need: int, signature: bytes) -> None:
        """Larger slots on all ranks: all know everybody's need, so all come here in the same exchange."""
        torch.cuda.synchronize(self._library.device)
        self._raise_if_failed()
        agree_on_exchange(self.group, self._epoch, signature)
        try:
            self._replace_memory(max(rounded_slot(need), _FIRST_SLOT_BYTES))
        except TransportUnavailable as error:  # on every rank alike
            self._plain, self._again = self._make_plain(), self._epoch + _PATIENCE
            self._made += 1
            self.name = f"{self._plain.name} in place of {self.name}"
            log.warning("%s: exchanging by %s for now", error, self._plain.name)

    def _leave_plain(self) -> None:
        if self._plain is not None:
            self._plain.close()
        self._plain = None
        self._made += 1
        self._use(self.method)

    def _raise_if_failed(self) -> None:
        if message := self._watch.failure():
            self._fail(ExchangeError(*message))

    def _faster_method(self) -> Method:
        """Both measured on the same exchange; the slowest rank's time counts, so that all ranks choose alike.

        Raises:
            TransportUnavailable: on every rank alike, if an exchange fails on any.
        """
        counts = [1024] * self.world_size
        medians = []
        for method in ("kernel", "copy"):
            self._use(method)  # type: ignore[arg-type]
            self._replace_memory(self._memory.slot_bytes)
            times, problem = [], ""
            try:
                x = torch.zeros(1, 1024, self.world_size, 4096, dtype=torch.bfloat16, device=self.device_type)
                for _ in range(7):
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    self.scatter_heads([x], counts)
                    self.check()
                    times.append(int((time.perf_counter() - started) * 1e9))
            except RuntimeError as error:
                problem = f"rank {self.rank} could not exchange: {error}"
            raise_together(self.group, problem)
            medians.append(int(statistics.median(times)))
        kernel, copy = (max(column) for column in zip(*all_gather_ints(self.group, medians), strict=True))
        self.stats.reset()
        self._replace_memory(self._memory.slot_bytes)
        return "kernel" if kernel <= copy else "copy"

    def _replace_memory(self, slot_bytes: int) -> None:
        """New slots on all ranks; also needed between two methods, which do not share the grants of slots."""
        torch.cuda.synchronize(self._library.device)
        all_gather_ints(self.group, [0])  # nobody writes any more
        self._memory.close_peers()
        all_gather_ints(self.group, [0])  # nobody has it open any more
        self._memory.close()
        # the buffers are not torch's, so what torch keeps for later is in their way
        torch.cuda.empty_cache()
        self._memory = PeerMemory(self.group, self._library, slot_bytes)
        self._own_slot = None
        self._made += 1


class ExchangeWatch:
    """A thread that sees an exchange that does not end, and calls it off.

    It looks at words in main memory that the kernels write; it makes no CUDA call, so it never waits for the device.
    """

    def __init__(self, library: GpuCalls, transport: PeerTransport) -> None:
        self._library, self._transport = library, transport
        self._address, self.seen_by_device = library.allocate_status()
        self._status = CStatus.from_address(self._address)
        self._reason = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sp-exchange-watch", daemon=True)
        self._thread.start()

    def failure(self) -> tuple[str, int | None] | None:
        """(message, rank at fault) once something went wrong."""
        if wrong := [rank for rank in range(self._transport.world_size) if self._status.mismatch[rank]]:
            return f"rank {wrong[0]} came to an exchange with another shape or dtype than rank {self._transport.rank}", wrong[0]
        if not self._status.abort:
            return None
        late = [rank for rank in range(self._transport.world_size) if self._status.late[rank]]
        if not late:
            return self._reason, None
        return f"{self._reason}; rank {self._transport.rank} was waiting for {ranks_text(late)}", late[0] if len(late) == 1 else None

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._library.free_status(self._address)

    def _run(self) -> None:
        epoch, since = 0, 0.0
        while not self._closing.wait(_STATUS_POLL_S):
            started, completed = self._status.started, self._status.completed
            if started == completed or self._status.abort:
                epoch = 0
                continue
            if started != epoch:
                epoch, since = started, time.monotonic()
            ask = self._transport.should_abort
            text = ask() if ask is not None else None
            if not text and time.monotonic() > since + self._transport.timeout_s:
                text = f"exchange {epoch} did not end within {self._transport.timeout_s:g} s ({STALL_TIMEOUT} raises the limit)"
            if text:
                self._reason = text
                self._status.abort = 1


def through(plain: Transport, exchange: Exchange, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same exchange as a move of another transport, which counts nothing: the caller does."""
    if exchange.kind is ExchangeKind.SCATTER_HEADS:
        return plain._scatter_heads(tensors, exchange.token_counts, exchange.head_counts)
    if exchange.kind is ExchangeKind.GATHER_HEADS:
        return [plain._gather_heads(tensors[0], exchange.token_counts, exchange.head_counts)]
    return [plain._all_gather_tokens(tensors[0], exchange.token_counts)]


def _views(lease: Lease, prepared: PreparedExchange) -> list[Tensor]:
    count = prepared.exchange.tensors
    if prepared.output_bytes == 0:
        return [torch.empty(prepared.shape, dtype=prepared.dtype, device="cuda") for _ in range(count)]
    windows = [Window(lease, index * prepared.tensor_stride, prepared.output_bytes) for index in range(count)]
    return [torch.as_tensor(window, device="cuda").view(prepared.dtype).view(prepared.shape) for window in windows]


def block_count(exchange: Exchange, processors: int) -> int:
    """Blocks of a launch: the same on all ranks, for it follows from what all ranks know.

    Two blocks a multiprocessor for large exchanges, one a peer for tiny ones; ``processors`` is the smallest of all ranks.
    """
    world_size = exchange.world_size
    share = sum(exchange.slot_bytes(rank) for rank in range(world_size)) // world_size
    return max(world_size, min(2 * processors, _MOST_BLOCKS, -(-share // _BLOCK_BYTES)))
