"""Makes the .venv that tests, demo and benchmarks run in; returns at once when nothing has changed.

Installs this project's requirements and, when a ComfyUI checkout is found, that checkout's
beside them: one resolution, so that both agree on one torch. Standard library only.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
OURS = [ROOT / "requirements-dev.txt", ROOT / "requirements.txt"]
STAMP = ENVIRONMENT / "installed"
#: exists when a ComfyUI was found but its requirements could not be installed
NO_HOST = ENVIRONMENT / "without-host"


def find_host_requirements() -> Path | None:
    sys.path.insert(0, str(ROOT))
    from sp_core.host_path import find_comfyui

    host = find_comfyui()
    path = host / "requirements.txt" if host else None
    return path if path is not None and path.is_file() else None


def fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()


def install(files: list[Path]) -> bool:
    words = [word for file in files for word in ("-r", str(file))]
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    return subprocess.run(command, check=False).returncode == 0


def main() -> int:
    host = find_host_requirements()
    wanted = fingerprint([*OURS, *([host] if host else [])])
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    if not PYTHON.exists():
        print(f"making {ENVIRONMENT}", flush=True)
        venv.create(ENVIRONMENT, with_pip=True)
    NO_HOST.unlink(missing_ok=True)
    if host is not None:
        print(f"installing requirements, with those of the ComfyUI in {host.parent} (torch is a large download)", flush=True)
        if install([OURS[0], host]):
            STAMP.write_text(wanted)
            return 0
        print(f"the requirements of the ComfyUI in {host.parent} do not install here: going on without host tests", flush=True)
        NO_HOST.write_text(str(host))
    else:
        print("installing requirements; no ComfyUI checkout was found (COMFYUI_PATH names one)", flush=True)
    if not install(OURS[:1]):
        print("the requirements do not install: see pip's message above", file=sys.stderr)
        return 1
    STAMP.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
