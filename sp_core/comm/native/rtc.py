"""Compiles the device code of ``csrc`` with the NVRTC that torch's own wheel brings: no toolkit, compiler or header is needed."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

from .build import CSRC, build_root

log = logging.getLogger(__name__)

#: the kernels of ``all2all_heads.cuh``
KERNELS = ("push_kernel", "signal_kernel", "wait_kernel")
_SOURCES = ("all2all_addresses.h", "all2all_heads.cuh")
_OPTIONS = ("-std=c++17", "-default-device")
#: NVRTC brings no headers of the C library; these are all that the kernels use of them
_TYPES = """
#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t; typedef unsigned long long uint64_t;
"""

_OUT_TEXT = POINTER(c_char_p)
_SIGNATURES = {
    "nvrtcCreateProgram": [POINTER(c_void_p), c_char_p, c_char_p, c_int, _OUT_TEXT, _OUT_TEXT],
    "nvrtcCompileProgram": [c_void_p, c_int, _OUT_TEXT],
    "nvrtcGetProgramLogSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetProgramLog": [c_void_p, c_char_p],
    "nvrtcGetCUBINSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetCUBIN": [c_void_p, c_char_p],
    "nvrtcDestroyProgram": [POINTER(c_void_p)],
}


class RtcError(RuntimeError):
    """The kernels could not be compiled; the message is NVRTC's own."""


class Image(NamedTuple):
    """Compiled kernels for one architecture."""

    cubin: bytes
    #: what NVRTC said; empty where there is nothing to say
    log: str


@functools.cache
def load_nvrtc() -> tuple[ctypes.CDLL | None, str]:
    """NVRTC as torch's wheel brings it, or the reason why there is none."""
    if torch.version.cuda is None:
        return None, "this torch is not built for CUDA"
    library, reason = wheel_library("nvrtc")
    if library is None:
        return None, reason
    missing = next((name for name in _SIGNATURES if not hasattr(library, name)), None)
    if missing is not None:
        return None, f"NVRTC has no function {missing}"
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes, getattr(library, name).restype = arguments, c_int
    library.nvrtcGetErrorString.argtypes, library.nvrtcGetErrorString.restype = [c_int], c_char_p
    return library, ""


def wheel_library(name: str) -> tuple[ctypes.CDLL | None, str]:
    """A library of CUDA that torch was built for, from the system's search path or from the wheels that torch requires."""
    major = (torch.version.cuda or "").split(".")[0]
    places = [str(path) for root in sys.path for path in sorted(Path(root or ".").glob(f"nvidia/*/lib/lib{name}.so.{major}*"))]
    for place in (f"lib{name}.so.{major}", *places):
        try:
            return ctypes.CDLL(place), ""
        except OSError:
            continue
    return None, f"torch brings no lib{name}.so.{major}"


def kernels_for(arch: str) -> bytes:
    """The cubin for an architecture such as "90"; compiled by the first process that asks, then read from the cache.

    Raises:
        RtcError: torch brings no NVRTC, or it cannot compile the kernels.
    """
    path = build_root() / f"sp_all2all_heads_{_key(arch)}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        cubin = compiled(arch).cubin
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a name of its own and then the final one: nobody reads half a file, whoever else compiles now
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(cubin)
        part.replace(path)
    except OSError as error:
        log.debug("the compiled kernels are not kept: %s", error)
    return cubin


def compiled(arch: str) -> Image:
    """The kernels for an architecture, compiled now.

    Raises:
        RtcError: torch brings no NVRTC, or it cannot compile them.
    """
    library, reason = load_nvrtc()
    if library is None:
        raise RtcError(reason)
    program = c_void_p()
    headers = {"cstdint": _TYPES, "stdint.h": _TYPES} | {name: (CSRC / name).read_text() for name in _SOURCES}
    texts = (c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (c_char_p * len(headers))(*(name.encode() for name in headers))
    source = f'#include "{_SOURCES[-1]}"\n'.encode()
    _check(library, library.nvrtcCreateProgram(byref(program), source, b"all2all_heads.cu", len(headers), texts, names))
    try:
        return _compile(library, program, arch)
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _compile(library: ctypes.CDLL, program: c_void_p, arch: str) -> Image:
    options = [f"--gpu-architecture=sm_{arch}", *_OPTIONS]
    code = library.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*(option.encode() for option in options)))
    said = _text(library, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace").strip()
    if code:
        raise RtcError(said or library.nvrtcGetErrorString(code).decode())
    return Image(_text(library, program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN"), said)


def _text(library: ctypes.CDLL, program: c_void_p, size_of: str, get: str) -> bytes:
    size = c_size_t()
    _check(library, getattr(library, size_of)(program, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, get)(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, code: int) -> None:
    if code:
        raise RtcError(library.nvrtcGetErrorString(code).decode())


def _key(arch: str) -> str:
    digest = hashlib.sha256(repr((arch, _OPTIONS, _TYPES, torch.version.cuda)).encode())
    for name in _SOURCES:
        digest.update((CSRC / name).read_bytes())
    return f"{arch}_{digest.hexdigest()[:12]}"
