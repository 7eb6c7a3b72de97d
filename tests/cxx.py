"""The C++ compiler of this machine, by which tests build what they run on the CPU."""

from __future__ import annotations

import shutil


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
