"""Which systems and devices are refused, and that the refusal says why and what to do."""

from __future__ import annotations

import pytest

from sp_core.pool.devices import platform_problem

WORKS = [("Linux", "cuda"), ("Linux", "rocm"), ("Linux", "xpu"), ("Linux", "cpu"), ("Darwin", "cpu")]
REFUSED = [
    ("Windows", "cuda", "no NCCL", "WSL2"),
    ("Windows", "rocm", "no RCCL", "WSL2"),
    ("Windows", "xpu", "no oneCCL", "WSL2"),
    ("Windows", "cpu", "does not have", "WSL2"),
    ("Darwin", "mps", "one GPU", "Remove SP Model Patch"),
]


@pytest.mark.parametrize(("system", "kind"), WORKS)
def test_what_works(system: str, kind: str) -> None:
    assert platform_problem(system, kind) is None


@pytest.mark.parametrize(("system", "kind", "reason", "instead"), REFUSED)
def test_what_is_refused(system: str, kind: str, reason: str, instead: str) -> None:
    text = platform_problem(system, kind)
    assert text is not None and system in text and kind in text and reason in text and instead in text
