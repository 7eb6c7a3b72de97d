"""Each contract on imports in pyproject.toml notices an import that spoils it, so ``make lint`` would fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
LATE = "\n\ndef late():\n    {}\n"
FOR_TYPES = "\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its contracts, to be spoiled."""
    shutil.copytree(ROOT / "sp_core", tmp_path / "sp_core", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder: Path, contract: str) -> str:
    """What a broken contract says, without its line breaks."""
    command = [sys.executable, "-c", LINT, "--no-cache", "--no-logo", "--contract", contract]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1 and "1 broken." in said, done.stdout + done.stderr
    return said


SPOILED = [
    # (contract, file that is spoiled, what is appended to it, what the broken contract names)
    ("layers", "comm/__init__.py", "\nfrom .. import plans\n", "sp_core.comm -> sp_core.plans"),
    ("layers", "planner/__init__.py", LATE.format("from ..comm import ring_shift"), "sp_core.planner -> sp_core.comm.ring_shift"),
    ("layers", "doctor/__init__.py", "\nfrom ..host import options\n", "sp_core.doctor -> sp_core.host.options"),
    ("processes", "pool/__init__.py", LATE.format("from ..layout import tiles"), "sp_core.pool -> sp_core.layout.tiles"),
    ("numbers", "plans/__init__.py", FOR_TYPES.format("from ..pool import worker"), "sp_core.plans -> sp_core.pool.worker"),
    ("two-processes", "host/ui/__init__.py", "\nfrom ..worker import service\n", "sp_core.host.ui -> sp_core.host.worker.service"),
    ("two-processes", "host/worker/__init__.py", LATE.format("from ..ui import session"), "sp_core.host.worker -> sp_core.host.ui.session"),
    ("no-circles", "layout/sharding.py", FOR_TYPES.format("from . import sequence"), "No cycles are allowed in sp_core.layout."),
    ("comfyui", "comm/__init__.py", LATE.format("import comfy.utils"), "sp_core.comm -> comfy"),
]


@pytest.mark.parametrize(("contract", "path", "code", "named"), SPOILED, ids=[f"{contract}: {path}" for contract, path, *_ in SPOILED])
def test_a_spoiled_import_breaks_its_contract(copy: Path, contract: str, path: str, code: str, named: str) -> None:
    file = copy / "sp_core" / path
    file.write_text(file.read_text() + code)
    assert named in lint(copy, contract)


def test_a_new_folder_has_to_find_its_place(copy: Path) -> None:
    (copy / "sp_core" / "attic").mkdir()
    (copy / "sp_core" / "attic" / "__init__.py").touch()
    assert "attic" in lint(copy, "layers")
