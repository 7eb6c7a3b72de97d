"""The peer exchange between CPU ranks: its own kernel, compiled for the CPU, on files that all ranks map as device memory."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cxx import compiler
from torch import Tensor

from sp_core.comm.native.cuda import IPC_HANDLE_BYTES, CLaunch, CStatus
from sp_core.comm.native.cuda_runtime import SLOTS_OFFSET
from sp_core.comm.registry import TransportRow, TransportSpec
from sp_core.comm.transports import peer
from sp_core.comm.transports.exchange_transport import PreparedExchange
from sp_core.comm.transports.peer import PeerTransport
from sp_core.comm.transports.peer_memory import Lease


def built_kernel(directory: Path) -> str:
    """Path of the library of ``kernel_on_cpu.cpp``, made in ``directory``."""
    library, source = directory / "kernel_on_cpu.so", Path(__file__).with_name("kernel_on_cpu.cpp")
    flags = ["-std=c++20", "-O1", "-pthread", "-shared", "-fPIC", "-DSP_THREADS=16", "-w"]
    found = compiler()
    assert found is not None
    subprocess.run([found, *flags, str(source), "-o", str(library)], check=True)
    return str(library)


class GpuOnCpu:
    """The calls of :class:`sp_core.comm.native.cuda_runtime.CudaRuntime` that an exchange by kernel makes."""

    device, slots_offset = 0, SLOTS_OFFSET

    def __init__(self, library: str, directory: str) -> None:
        self._library, self._directory = ctypes.CDLL(library), Path(directory)
        self._mapped: dict[int, mmap.mmap] = {}

    def multiprocessors(self) -> int:
        return 1

    def allocate(self, size: int) -> tuple[int, bytes]:
        name = uuid.uuid4().hex
        with (self._directory / name).open("wb") as file:
            file.truncate(size)
        handle = name.encode().ljust(IPC_HANDLE_BYTES, b"\0")
        return self.open(handle), handle

    def open(self, handle: bytes) -> int:
        with (self._directory / handle.rstrip(b"\0").decode()).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._mapped[base] = mapped
        return base

    def close(self, base: int) -> None:
        del self._mapped[base]

    free = close

    def allocate_status(self) -> tuple[int, int]:
        self._status = CStatus()
        return (ctypes.addressof(self._status),) * 2

    def free_status(self, host: int) -> None:
        pass

    def push(self, launch: CLaunch, stream: int) -> None:
        self._library.push(ctypes.byref(launch))


class PeerOnCpu(PeerTransport):
    device_type = "cpu"


def _views(lease: Lease, prepared: PreparedExchange) -> list[Tensor]:
    """As :func:`.peer._views`, which has torch wrap memory of a GPU."""
    if prepared.output_bytes == 0:
        return [torch.empty(prepared.shape, dtype=prepared.dtype) for _ in range(prepared.exchange.tensors)]
    views = []
    for index in range(prepared.exchange.tensors):
        window = (ctypes.c_char * prepared.output_bytes).from_address(lease.address + index * prepared.tensor_stride)
        window.lease = lease  # type: ignore[attr-defined]
        views.append(torch.frombuffer(window, dtype=prepared.dtype).view(prepared.shape))
    return views


def row_on_cpu(row: TransportRow, library: str, directory: str) -> TransportRow:
    """The row of the peer exchange as one for CPU ranks, in a process that has no other use for CUDA."""
    nothing: Any = lambda *_: None  # noqa: E731
    torch.cuda.synchronize = torch.cuda.empty_cache = torch.cuda.is_current_stream_capturing = nothing
    torch.cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=0, synchronize=nothing)  # type: ignore[assignment]
    peer._views = _views

    def make(spec: TransportSpec) -> PeerTransport:
        gpu: Any = GpuOnCpu(library, directory)
        return PeerOnCpu(spec.group, gpu, timeout_s=spec.timeout_s, should_abort=spec.should_abort, plain=spec.plain)

    return replace(row, device="cpu", make=make, lacks=None)
