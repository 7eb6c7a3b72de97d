"""The C interface of ``csrc/all2all_heads.cu`` as Python sees it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_uint32, c_uint64, c_void_p
from typing import ClassVar

from .addresses import MAX_WORLD
from .cpu import MAX_TENSORS, CExchange

IPC_HANDLE_BYTES = 64


class CStatus(ctypes.Structure):
    """``Status``: what a running exchange tells the host, and the host's word to give up."""

    _fields_: ClassVar = [
        ("abort", c_uint32),
        ("started", c_uint32),
        ("completed", c_uint32),
        ("reserved", c_uint32),
        ("late", c_uint32 * MAX_WORLD),
        ("mismatch", c_uint32 * MAX_WORLD),
    ]


class CLaunch(ctypes.Structure):
    """``Launch``: everything one exchange needs to know on the device."""

    _fields_: ClassVar = [
        ("exchange", CExchange),
        ("rank", c_int32),
        ("blocks", c_int32),
        ("fixed_slot", c_int32),
        ("next_slot", c_int32),
        ("epoch", c_uint32),
        ("signature", c_uint32),
        ("slot_bytes", c_uint64),
        ("sources", c_void_p * MAX_TENSORS),
        ("source_batch", ctypes.c_int64 * MAX_TENSORS),
        ("source_token", ctypes.c_int64 * MAX_TENSORS),
        ("peers", c_void_p * MAX_WORLD),
        ("status", c_void_p),
    ]


class CudaError(RuntimeError):
    """A CUDA call failed; the message is CUDA's own."""


_OUT = POINTER(c_void_p)
_SIGNATURES = {
    "spg_multiprocessors": [c_int, POINTER(c_int)],
    "spg_allocate": [c_int, c_uint64, _OUT, c_char_p],
    "spg_free": [c_int, c_void_p],
    "spg_open": [c_int, c_char_p, _OUT],
    "spg_close": [c_int, c_void_p],
    "spg_allocate_status": [c_int, _OUT, _OUT],
    "spg_free_status": [c_int, c_void_p],
    "spg_push": [c_int, POINTER(CLaunch), c_void_p],
    "spg_copy": [c_int, POINTER(CLaunch), c_void_p],
}


class CudaLibrary:
    """Typed calls on one device. Every method may raise :class:`CudaError`."""

    def __init__(self, handle: ctypes.CDLL, device: int) -> None:
        self._handle, self.device = handle, device
        for name, arguments in _SIGNATURES.items():
            function = getattr(handle, name)
            function.restype, function.argtypes = c_int, arguments
        handle.spg_error.restype, handle.spg_error.argtypes = c_char_p, [c_int]
        for name in ("spg_slots_offset", "spg_launch_bytes", "spg_status_bytes"):
            getattr(handle, name).restype = c_uint64
        if handle.spg_launch_bytes() != ctypes.sizeof(CLaunch) or handle.spg_status_bytes() != ctypes.sizeof(CStatus):
            raise CudaError("the library does not fit this version of the extension")
        self.slots_offset: int = handle.spg_slots_offset()

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._handle, name)(self.device, *arguments):
            raise CudaError(self._handle.spg_error(code).decode())

    def multiprocessors(self) -> int:
        count = c_int()
        self._call("spg_multiprocessors", byref(count))
        return count.value

    def allocate(self, size: int) -> tuple[int, bytes]:
        """(address, IPC handle) of a new buffer."""
        base, handle = c_void_p(), ctypes.create_string_buffer(IPC_HANDLE_BYTES)
        self._call("spg_allocate", size, byref(base), handle)
        return base.value or 0, handle.raw

    def free(self, base: int) -> None:
        self._call("spg_free", base)

    def open(self, handle: bytes) -> int:
        base = c_void_p()
        self._call("spg_open", handle, byref(base))
        return base.value or 0

    def close(self, base: int) -> None:
        self._call("spg_close", base)

    def allocate_status(self) -> tuple[int, int]:
        """(address here, address on the device) of a zeroed :class:`CStatus`."""
        host, seen = c_void_p(), c_void_p()
        self._call("spg_allocate_status", byref(host), byref(seen))
        return host.value or 0, seen.value or 0

    def free_status(self, host: int) -> None:
        self._call("spg_free_status", host)

    def push(self, launch: CLaunch, stream: int) -> None:
        self._call("spg_push", byref(launch), stream)

    def copy(self, launch: CLaunch, stream: int) -> None:
        self._call("spg_copy", byref(launch), stream)
