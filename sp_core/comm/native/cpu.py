"""The C interface of ``csrc/all2all_cpu.cpp`` as Python sees it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import ClassVar

from .addresses import MAX_WORLD, Exchange


class ExchangeStatus(IntEnum):
    DONE = 0
    WAITING = 1
    MISMATCH = 2
    PEER_FAILED = 3
    NO_MEMORY = 4


class CExchange(ctypes.Structure):
    """``sp::Exchange`` of ``all2all_addresses.h``."""

    _fields_: ClassVar = [
        ("kind", c_int32),
        ("world", c_int32),
        ("tensors", c_int32),
        ("reserved", c_int32),
        ("batch", c_int64),
        ("heads", c_int64),
        ("head_bytes", c_int64),
        ("token_counts", c_int64 * MAX_WORLD),
        ("head_counts", c_int64 * MAX_WORLD),
    ]

    @classmethod
    def of(cls, exchange: Exchange) -> CExchange:
        counts = [(c_int64 * MAX_WORLD)(*counts) for counts in (exchange.token_counts, exchange.head_counts)]
        return cls(exchange.kind, exchange.world_size, exchange.tensors, 0, exchange.batch, exchange.heads, exchange.head_bytes, *counts)


#: tensors that one exchange can carry
MAX_TENSORS = 8

_SIGNATURES = {
    "sp_header_bytes": (c_int, []),
    "sp_prepare": (None, [c_void_p, c_int, c_int, c_uint64]),
    "sp_join": (c_void_p, [c_int, c_int, c_uint64, POINTER(c_int), POINTER(c_void_p), c_uint64, POINTER(c_int)]),
    "sp_tell": (None, [c_void_p, c_int, c_char_p]),
    "sp_leave": (None, [c_void_p]),
    "sp_grant": (None, [c_void_p, c_uint64, c_int, c_uint64, c_uint64]),
    "sp_start": (
        None,
        [c_void_p, c_uint64, POINTER(CExchange), c_char_p, POINTER(c_void_p), POINTER(c_int64), POINTER(c_int64)],
    ),
    "sp_advance": (c_int, [c_void_p, c_int]),
    "sp_late": (c_uint32, [c_void_p]),
    "sp_culprit": (c_int, [c_void_p]),
    "sp_signature": (c_char_p, [c_void_p, c_int]),
    "sp_message": (c_char_p, [c_void_p, c_int]),
}


def bind(handle: ctypes.CDLL) -> ctypes.CDLL:
    """Declares argument and result types on a loaded library."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
    return handle
