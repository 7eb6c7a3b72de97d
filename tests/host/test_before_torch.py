"""What a worker prepares of ComfyUI before torch is imported, in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREPARE = """
import sys
sys.path.insert(0, {root!r})
from sp_core.host.worker.before_torch import prepare
prepare({options!r})
import folder_paths
print("torch" in sys.modules, folder_paths.get_temp_directory())
"""


@pytest.mark.parametrize("flag", ["--temp-directory", "--base-directory"])
def test_a_worker_has_the_temporary_folder_of_the_server(comfyui: Path, tmp_path: Path, flag: str) -> None:
    options = {"host_root": str(comfyui), "arguments": [flag, str(tmp_path), "--cpu"]}
    code = PREPARE.format(root=str(ROOT), options=options)
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert said.splitlines()[-1] == f"False {tmp_path / 'temp'}"
