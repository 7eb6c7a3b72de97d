"""The GPU's exchange kernel, compiled by the NVRTC of torch's wheel with no compiler or toolkit on the path."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from sp_core.comm.native import rtc
from sp_core.comm.native.cuda_runtime import load_runtime

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")


@pytest.fixture(autouse=True)
def nothing_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library, reason = rtc.load_nvrtc()
    if library is None:
        pytest.skip(reason)
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_clean(arch: str, tmp_path: Path) -> None:
    assert shutil.which("nvcc") is None and shutil.which("c++") is None
    image = rtc.compiled(arch)
    assert image.log == ""
    assert global_functions(image.cubin) >= set(rtc.KERNELS)


def global_functions(cubin: bytes) -> set[str]:
    """Names that can be looked up in an ELF file: of its symbols those that are global functions."""
    assert cubin[:4] == b"\x7fELF"
    number = lambda at, size: int.from_bytes(cubin[at : at + size], "little")  # noqa: E731
    start, entry, count = number(0x28, 8), number(0x3A, 2), number(0x3C, 2)
    sections = [start + index * entry for index in range(count)]
    names = set()
    for section in sections:
        if number(section + 4, 4) != 2:  # SHT_SYMTAB
            continue
        offset, size = number(section + 0x18, 8), number(section + 0x20, 8)
        texts = number(sections[number(section + 0x28, 4)] + 0x18, 8)
        for symbol in range(offset, offset + size, 24):
            if cubin[symbol + 4] == 0x12:  # STB_GLOBAL, STT_FUNC
                name = texts + number(symbol, 4)
                names.add(cubin[name : cubin.index(b"\0", name)].decode())
    return names


def test_an_architecture_that_is_none_is_an_error_of_nvrtcs() -> None:
    with pytest.raises(rtc.RtcError, match="architecture"):
        rtc.compiled("1")


def test_is_compiled_once_and_read_after_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rtc.kernels_for("80")
    [kept] = (tmp_path / "cache").iterdir()
    assert kept.read_bytes() == first
    monkeypatch.setattr(rtc, "compiled", None)
    assert rtc.kernels_for("80") == first


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert rtc.kernels_for("80")[:4] == b"\x7fELF"


def test_the_runtime_has_every_function_that_is_called() -> None:
    runtime, reason = load_runtime()
    assert reason == ""
    # here without a device, where there is none: each call ends in an error of CUDA's, not in a crash
    assert runtime.cudaGetErrorString(2) == b"out of memory"
    count = ctypes.c_int()
    code = runtime.cudaDeviceGetAttribute(ctypes.byref(count), 16, 0)
    assert count.value > 0 if code == 0 else runtime.cudaGetErrorString(code)


def test_the_wheel_is_found_where_the_system_does_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    load = ctypes.CDLL

    def wheels_only(place: str) -> ctypes.CDLL:
        tried.append(place)
        if "/" not in place:
            raise OSError("not on the search path")
        return load(place)

    monkeypatch.setattr(ctypes, "CDLL", wheels_only)
    library, reason = rtc.wheel_library("nvrtc")
    assert library is not None, reason
    assert "/nvidia/" in tried[-1]
