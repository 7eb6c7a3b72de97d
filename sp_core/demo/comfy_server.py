"""A headless ComfyUI of our own, started with a private base directory and driven over its HTTP API."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..host_path import EXTENSION
from .checkpoints import Checkpoint

#: the node pack of the demo and the benchmarks
DEMO_NODES = Path(__file__).parent / "nodes" / "sp_demo_nodes"


def prepare_base(host: Path, base: Path, packs: Sequence[Path] = (), more: Mapping[str, Checkpoint] | None = None) -> None:
    """Make a base directory with tiny checkpoints and this extension among its custom nodes.

    Args:
        packs: other node packs.
        more: checkpoints beside the demo's, by file name.
    """
    for folder in ("models/diffusion_models", "models/loras", "custom_nodes", "input", "output", "user", "temp"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    for name, source in {"sequence-parallel": EXTENSION, **{pack.name: pack for pack in packs}}.items():
        link = base / "custom_nodes" / name
        if not link.exists():
            link.symlink_to(source, target_is_directory=True)
    # in a process of its own, as it imports the host
    script = Path(__file__).with_name("checkpoints.py")
    command = [sys.executable, str(script), str(host), str(base / "models" / "diffusion_models"), json.dumps(dict(more or {}))]
    subprocess.run(command, check=True)


class PromptFailed(RuntimeError):
    """ComfyUI refused a prompt or its execution failed; ``details`` is what it said."""

    def __init__(self, message: str, details: Any = None) -> None:
        super().__init__(message)
        self.details = details


class ComfyServer:
    """One ComfyUI process, in a ``with`` block. Methods that talk to it raise OSError where it does not answer."""

    def __init__(
        self, host: Path, base: Path, *flags: str, environment: dict[str, str] | None = None, wrapper: tuple[str, ...] = ()
    ) -> None:
        self.host, self.base = host, base
        self.port = _free_port()
        self.log_path = base / f"server-{self.port}.log"
        self._log = open(self.log_path, "w")  # noqa: SIM115
        command = [sys.executable, str(host / "main.py"), "--port", str(self.port), "--base-directory", str(base), "--disable-api-nodes"]
        command = [*wrapper, *command]
        command += ["--database-url", "sqlite:///:memory:", "--dont-print-server", *flags]
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, cwd=base, env={**os.environ, **(environment or {})}
        )

    def __enter__(self) -> ComfyServer:
        try:
            self.wait_until_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout: float = 20) -> None:
        """End the process, by force if it has not ended after ``timeout`` seconds."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        self.process.kill()
        self.process.wait()
        self._log.close()

    def wait_until_up(self, timeout: float = 180) -> None:
        """Return when the server answers.

        Raises:
            RuntimeError: it ended, or did not answer within ``timeout`` seconds; the message ends with its log.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended while starting:\n{self.log()[-3000:]}")
            with contextlib.suppress(OSError, urllib.error.URLError):
                self.get("/system_stats")
                return
            time.sleep(0.2)
        raise RuntimeError(f"ComfyUI did not start within {timeout:.0f} s:\n{self.log()[-3000:]}")

    def log(self, since: int = 0) -> str:
        """What the server has said, from that character on."""
        return self.log_path.read_text(errors="replace")[since:]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            return json.loads(response.read() or b"null")

    def post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            details = json.loads(error.read() or b"null")
            raise PromptFailed(_refusal(details), details) from error

    def queue(self, prompt: dict[str, Any]) -> str:
        """Post a prompt in API format; returns its id."""
        return self.post("/prompt", {"prompt": prompt, "client_id": uuid.uuid4().hex})["prompt_id"]

    def wait(self, prompt_id: str, timeout: float = 300) -> dict[str, Any]:
        """The prompt's history entry, once it has run.

        Raises:
            PromptFailed: it failed; the message is the node's.
            RuntimeError: the server ended meanwhile.
            TimeoutError: it takes more than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                entry = history[prompt_id]
                for event, data in entry["status"]["messages"]:
                    if event == "execution_error":
                        raise PromptFailed(f"{data['node_type']}: {data['exception_message']}", data)
                    if event == "execution_interrupted":
                        raise PromptFailed("interrupted", data)
                return entry
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended while running a prompt:\n{self.log()[-3000:]}")
            time.sleep(0.02)
        raise TimeoutError(f"the prompt did not finish within {timeout:.0f} s:\n{self.log()[-3000:]}")

    def run(self, prompt: dict[str, Any], timeout: float = 300) -> dict[str, Any]:
        """Queue, wait, and return the outputs of its output nodes."""
        return self.wait(self.queue(prompt), timeout)["outputs"]


def prompt_seconds(entry: dict[str, Any]) -> float:
    """Seconds from ComfyUI's start of a prompt to its end, from the prompt's history entry."""
    times = {event: data["timestamp"] for event, data in entry["status"]["messages"]}
    return float(times["execution_success"] - times["execution_start"]) / 1e3


def _refusal(details: Any) -> str:
    """What the server says of a prompt that it refuses, in one line."""
    if not isinstance(details, dict):
        return str(details)
    lines = [details.get("error", {}).get("message", "refused")] if isinstance(details.get("error"), dict) else [str(details.get("error"))]
    for node in (details.get("node_errors") or {}).values():
        lines += [f"{node['class_type']}: {error['message']}: {error['details']}" for error in node["errors"]]
    return "; ".join(lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
