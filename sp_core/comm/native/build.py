"""Builds the compiled parts on first use, and says why when it cannot.

The sources in ``csrc`` have a plain C interface and no torch headers, so a build takes seconds,
and one build serves every torch version. Nothing is built at import. A missing compiler, a failed
build or ``SP_NO_EXT=1`` is a *reason* that the choice of a transport reports, not an error.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from ... import settings

log = logging.getLogger(__name__)

CSRC = Path(__file__).resolve().parents[3] / "csrc"
HEADERS = ("all2all_addresses.h", "all2all_heads.cuh")
CPU_FLAGS = ("-std=c++20", "-O3")


class Library(NamedTuple):
    """A loaded library, or the reason why there is none (a sentence without a full stop)."""

    handle: ctypes.CDLL | None
    reason: str


def load_cpu() -> Library:
    """The shared-memory exchange between CPU ranks."""
    if reason := _switched_off():
        return Library(None, reason)
    if not sys.platform.startswith("linux"):
        return Library(None, f"the shared-memory exchange needs Linux, this is {sys.platform}")
    return _load("all2all_cpu.cpp", CPU_FLAGS)


def load_cuda() -> Library:
    """The exchange between GPUs by peer writes, as nvcc builds it: for tools, and where torch brings no NVRTC."""
    if reason := no_exchange_between_gpus():
        return Library(None, reason)
    return _load("all2all_heads.cu", ("-std=c++17", "-O3"))


def no_exchange_between_gpus() -> str:
    """Why no compiled part for GPUs can be used here, whoever compiles it, or ""."""
    if reason := _switched_off():
        return reason
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    if not sys.platform.startswith("linux"):
        return f"the peer exchange needs Linux, this is {sys.platform}"
    if not torch.cuda.is_available() and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return "no CUDA device is visible"
    return ""


def _switched_off() -> str:
    return f"{settings.NO_EXTENSIONS}=1 turns compiled parts off" if settings.no_extensions() else ""


@functools.cache
def _load(source: str, flags: tuple[str, ...]) -> Library:
    try:
        return Library(ctypes.CDLL(str(_built(source, flags))), "")
    except Exception as error:  # whatever a toolchain can do wrong: the caller goes on without
        log.debug("building %s failed", source, exc_info=True)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        marks = ("error:", "cannot find", "not found", "No such file")
        telling = next((line.strip() for line in lines if any(mark in line for mark in marks)), lines[0])
        return Library(None, f"{source} could not be built: {telling[:200]}")


def _built(source: str, flags: tuple[str, ...]) -> Path:
    """Path of the library; builds it if no earlier process has."""
    cuda = source.endswith(".cu")
    name = f"sp_{Path(source).stem}_{_key(source, flags)}"
    directory = build_root() / name
    library = directory / f"{name}.so"
    finished = directory / "finished"
    if finished.exists():
        return library
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"no C++ compiler ({compiler}) was found")
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_suffix(".lock")), _ninja_on_path():
        if not finished.exists():
            # torch's own lock file survives a killed builder and would be waited for without end
            (directory / "lock").unlink(missing_ok=True)
            from torch.utils import cpp_extension

            if cuda and cpp_extension.CUDA_HOME is None:
                raise RuntimeError("no CUDA toolkit (nvcc) was found")
            cpp_extension.load(
                name,
                [str(CSRC / source)],
                extra_cflags=None if cuda else list(flags),
                extra_cuda_cflags=list(flags) if cuda else None,
                extra_ldflags=_cuda_library_flags(directory) if cuda else None,
                extra_include_paths=[str(CSRC)],
                build_directory=str(directory),
                is_python_module=False,
            )
            finished.touch()
    return library


def _key(source: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((flags, sysconfig.get_platform(), torch.__version__)).encode())
    if source.endswith(".cu"):
        digest.update(repr((os.environ.get("TORCH_CUDA_ARCH_LIST"), _capabilities())).encode())
    for name in (source, *HEADERS):
        digest.update((CSRC / name).read_bytes())
    return digest.hexdigest()[:12]


def _capabilities() -> list[tuple[int, int]]:
    if not torch.cuda.is_available():
        return []
    return sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})


def build_root() -> Path:
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions" / "sequence_parallel"


def _cuda_library_flags(directory: Path) -> list[str]:
    """Links against the libcudart that torch itself uses, under the plain name that a linker looks for."""
    for root in sys.path:
        for library in sorted(Path(root or ".").glob("nvidia/*/lib/libcudart.so.*")):
            link = directory / "libcudart.so"
            link.unlink(missing_ok=True)
            link.symlink_to(library)
            return [f"-L{directory}", f"-Wl,-rpath,{library.parent}"]
    return []


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time on this machine; the system lets go of the lock when its holder dies."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """torch calls plain ``ninja``, which a virtual environment that is not activated hides."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = before
