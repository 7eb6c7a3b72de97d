"""What the exchange between GPUs needs of CUDA, through the runtime of torch's wheel and the driver: nothing is linked or built.

The calls are those of ``csrc/all2all_heads.cu``, which is the same in C for tools that take apart a program of nvcc's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, addressof, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, ClassVar

import torch

from .addresses import MAX_WORLD, Copy, Exchange, ExchangeKind
from .cuda import IPC_HANDLE_BYTES, CLaunch, CStatus, CudaError
from .rtc import KERNELS, RtcError, kernels_for, load_nvrtc, wheel_library

#: ``kThreads``, ``kMaxBlocks`` and ``kEpochs`` of ``all2all_heads.cuh``
_THREADS, MOST_BLOCKS, _EPOCHS = 256, 512, 4
_MULTIPROCESSOR_COUNT = 16  # cudaDevAttrMultiProcessorCount
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostAllocPortable, cudaHostAllocMapped
_ANY_DIRECTION = 4  # cudaMemcpyDefault


class CControl(ctypes.Structure):
    """``Control``: what stands before the slots of a rank, written by its peers."""

    _fields_: ClassVar = [("grants", ctypes.c_uint64 * MAX_WORLD * _EPOCHS), ("arrived", ctypes.c_uint64 * MOST_BLOCKS * MAX_WORLD)]


#: bytes before the first slot: ``kSlots``
SLOTS_OFFSET = -(-ctypes.sizeof(CControl) // 512) * 512


class CIpcHandle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, which is passed by value."""

    _fields_: ClassVar = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


_OUT = POINTER(c_void_p)
_RUNTIME: dict[str, list[Any]] = {
    "cudaSetDevice": [c_int],
    "cudaDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cudaMalloc": [_OUT, c_size_t],
    "cudaFree": [c_void_p],
    "cudaMemset": [c_void_p, c_int, c_size_t],
    "cudaDeviceSynchronize": [],
    "cudaIpcGetMemHandle": [POINTER(CIpcHandle), c_void_p],
    "cudaIpcOpenMemHandle": [_OUT, CIpcHandle, c_uint],
    "cudaIpcCloseMemHandle": [c_void_p],
    "cudaHostAlloc": [_OUT, c_size_t, c_uint],
    "cudaHostGetDevicePointer": [_OUT, c_void_p, c_uint],
    "cudaFreeHost": [c_void_p],
    "cudaMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
    "cudaMemcpy2DAsync": [c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, c_void_p],
    "cudaGetLastError": [],
}
_DRIVER: dict[str, list[Any]] = {
    "cuModuleLoadData": [_OUT, c_char_p],
    "cuModuleGetFunction": [_OUT, c_void_p, c_char_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, _OUT, _OUT],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}


def load_runtime() -> tuple[ctypes.CDLL | None, str]:
    """torch's CUDA runtime with its functions declared, or the reason why it cannot be used."""
    runtime, reason = wheel_library("cudart")
    reason = reason or declared(runtime, _RUNTIME)
    if runtime is None or reason:
        return None, reason
    runtime.cudaGetErrorString.argtypes, runtime.cudaGetErrorString.restype = [c_int], c_char_p
    return runtime, ""


def load_driver() -> tuple[ctypes.CDLL | None, str]:
    """The driver with its functions declared, or the reason why it cannot be used."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, "no CUDA driver (libcuda.so.1) was found"
    reason = declared(driver, _DRIVER)
    return (None, reason) if reason else (driver, "")


def declared(library: ctypes.CDLL | None, signatures: Mapping[str, Sequence[Any]]) -> str:
    """Declares the arguments of functions; which one the library lacks, or ""."""
    for name, arguments in signatures.items():
        if not hasattr(library, name):
            return f"CUDA has no function {name}"
        getattr(library, name).argtypes, getattr(library, name).restype = arguments, c_int
    return ""


def unusable() -> str:
    """Why kernels cannot be compiled and run here without a toolkit, or ""."""
    return next((reason for _, reason in (load_nvrtc(), load_runtime(), load_driver()) if reason), "")


class CudaRuntime:
    """The calls of :class:`.cuda.CudaLibrary` on one device. Every method may raise :class:`CudaError`."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.slots_offset = SLOTS_OFFSET
        (runtime, no_runtime), (driver, no_driver) = load_runtime(), load_driver()
        if runtime is None or driver is None:
            raise CudaError(no_runtime or no_driver)
        self._runtime, self._driver = runtime, driver
        major, minor = torch.cuda.get_device_capability(device)
        try:
            cubin = kernels_for(f"{major}{minor}")
        except RtcError as error:
            raise CudaError(f"the kernels could not be compiled: {str(error).splitlines()[0]}") from error
        # the runtime's call makes torch's context of this device current, which the driver's calls then use
        self._call("cudaSetDevice", device)
        self._call("cudaFree", None)
        module = c_void_p()
        self._drive("cuModuleLoadData", byref(module), cubin)
        self._kernels = {name: c_void_p() for name in KERNELS}
        for name, function in self._kernels.items():
            self._drive("cuModuleGetFunction", byref(function), module, name.encode())

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._runtime, name)(*arguments):
            self._runtime.cudaGetLastError()  # or torch's next check finds it
            raise CudaError(self._runtime.cudaGetErrorString(code).decode())

    def _drive(self, name: str, *arguments: object) -> None:
        if code := getattr(self._driver, name)(*arguments):
            text = c_char_p()
            self._driver.cuGetErrorString(code, byref(text))
            raise CudaError((text.value or f"error {code} of {name}".encode()).decode())

    def _here(self, name: str, *arguments: object) -> None:
        self._call("cudaSetDevice", self.device)
        self._call(name, *arguments)

    def multiprocessors(self) -> int:
        count = c_int()
        self._call("cudaDeviceGetAttribute", byref(count), _MULTIPROCESSOR_COUNT, self.device)
        return count.value

    def allocate(self, size: int) -> tuple[int, bytes]:
        """(address, IPC handle) of a new buffer, whose control block is zero."""
        base, handle = c_void_p(), CIpcHandle()
        self._here("cudaMalloc", byref(base), size)
        try:
            self._call("cudaMemset", base, 0, self.slots_offset)
            self._call("cudaDeviceSynchronize")
            self._call("cudaIpcGetMemHandle", byref(handle), base)
        except CudaError:
            self._runtime.cudaFree(base)
            raise
        return base.value or 0, bytes(handle)

    def free(self, base: int) -> None:
        self._here("cudaFree", base)

    def open(self, handle: bytes) -> int:
        base = c_void_p()
        self._here("cudaIpcOpenMemHandle", byref(base), CIpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return base.value or 0

    def close(self, base: int) -> None:
        self._here("cudaIpcCloseMemHandle", base)

    def allocate_status(self) -> tuple[int, int]:
        """(address here, address on the device) of a zeroed :class:`CStatus`."""
        host, seen = c_void_p(), c_void_p()
        size = ctypes.sizeof(CStatus)
        self._here("cudaHostAlloc", byref(host), size, _PORTABLE_AND_MAPPED)
        ctypes.memset(host, 0, size)
        self._call("cudaHostGetDevicePointer", byref(seen), host, 0)
        return host.value or 0, seen.value or 0

    def free_status(self, host: int) -> None:
        self._here("cudaFreeHost", host)

    def push(self, launch: CLaunch, stream: int) -> None:
        """The exchange by stores of the multiprocessors. Asynchronous on ``stream``."""
        if not launch.exchange.world <= launch.blocks <= MOST_BLOCKS:
            raise CudaError(f"a launch of {launch.blocks} blocks for {launch.exchange.world} ranks is not possible")
        self._call("cudaSetDevice", self.device)
        self._launch("push_kernel", launch.blocks, _THREADS, launch, stream)

    def copy(self, launch: CLaunch, stream: int) -> None:
        """The exchange by copy engines into ``fixed_slot`` of every peer. Asynchronous on ``stream``."""
        self._call("cudaSetDevice", self.device)
        exchange = exchange_of(launch)
        for turn in range(1, exchange.world_size + 1):
            to = (launch.rank + turn) % exchange.world_size
            slot = launch.peers[to] + self.slots_offset + launch.fixed_slot * launch.slot_bytes
            for tensor in range(exchange.tensors):
                copy = exchange.copy_between(launch.rank, to, tensor, launch.source_batch[tensor], launch.source_token[tensor])
                self._copy_runs(copy, slot + copy.target, (launch.sources[tensor] or 0) + copy.source, stream)
        self._launch("signal_kernel", 1, 32, launch, stream)
        self._launch("wait_kernel", 1, 32, launch, stream)

    def _copy_runs(self, copy: Copy, target: int, source: int, stream: int) -> None:
        run, tokens = copy.run_bytes, copy.tokens
        if not run or not tokens:
            return
        if copy.source_token == run == copy.target_token:
            run, tokens = run * tokens, 1
        for batch in range(copy.batch):
            into, from_ = target + batch * copy.target_batch, source + batch * copy.source_batch
            if tokens == 1:
                self._call("cudaMemcpyAsync", into, from_, run, _ANY_DIRECTION, stream)
            elif copy.source_token >= run:
                pitches = copy.target_token, from_, copy.source_token
                self._call("cudaMemcpy2DAsync", into, *pitches, run, tokens, _ANY_DIRECTION, stream)
            else:  # a broadcast token: a pitch cannot say that
                for token in range(tokens):
                    place = into + token * copy.target_token, from_ + token * copy.source_token
                    self._call("cudaMemcpyAsync", *place, run, _ANY_DIRECTION, stream)

    def _launch(self, kernel: str, blocks: int, threads: int, launch: CLaunch, stream: int) -> None:
        # of an argument that is passed by value the driver wants the address
        arguments = (c_void_p * 1)(addressof(launch))
        self._drive("cuLaunchKernel", self._kernels[kernel], blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None)


def exchange_of(launch: CLaunch) -> Exchange:
    """The exchange that a launch carries."""
    of = launch.exchange
    tokens, heads = tuple(of.token_counts[: of.world]), tuple(of.head_counts[: of.world])
    return Exchange(ExchangeKind(of.kind), of.tensors, of.batch, of.heads, of.head_bytes, tokens, heads)
