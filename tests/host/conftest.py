"""A real ComfyUI server with tiny checkpoints. Without a ComfyUI checkout these tests are skipped, with one line that says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.longcat_ranks import enter_host
from host.graphs import Case, nodes_of

from sp_core.demo.comfy_server import ComfyServer, prepare_base
from sp_core.host_path import find_comfyui

HERE = Path(__file__).resolve().parent
PACKS = [HERE / "packs" / "sp_test_nodes", HERE / "packs" / "sp_foreign_nodes"]
_MISSING = "no ComfyUI checkout found: set COMFYUI_PATH to run the host tests"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # host tests come last: they put the host's folder on sys.path. Among them those of the shared server, so that it
    # runs beside no other, and those of equal devices one after another: workers are started once for all of them
    items.sort(key=lambda item: (HERE in item.path.parents, _devices_on_the_shared_server(item)))
    if find_comfyui() is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=_MISSING))


def _devices_on_the_shared_server(item: pytest.Item) -> str:
    if "server" not in getattr(item, "fixturenames", ()):
        return ""
    named = re.search(r"cpu:\d+", item.name)
    return named[0] if named else getattr(item.module, "DEVICES", "cpu")  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if _MISSING in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} host tests skipped: {_MISSING}")


@pytest.fixture(scope="session")
def comfyui() -> Path:
    path = find_comfyui()
    assert path is not None  # pytest_collection_modifyitems skipped the test
    return path


@pytest.fixture(scope="module")
def comfyui_here(comfyui: Path) -> Iterator[str]:
    """The checkout, whose modules can be imported in this process while the tests of a module run."""
    before = list(sys.path)
    enter_host(str(comfyui))
    with torch.inference_mode():
        yield str(comfyui)
    sys.path[:] = before


@pytest.fixture(scope="session")
def base(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base directory of all servers of this session: tiny checkpoints, this extension, the test nodes."""
    folder = tmp_path_factory.mktemp("comfyui")
    prepare_base(comfyui, folder, PACKS)
    subprocess.run([sys.executable, str(HERE / "checkpoints.py"), str(comfyui), str(folder / "models" / "diffusion_models")], check=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread_each() -> Iterator[None]:
    """A server's threads would spin for the cores that its workers compute on; a user's setting holds."""
    with pytest.MonkeyPatch.context() as patch:
        if "OMP_NUM_THREADS" not in os.environ:
            patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def server(comfyui: Path, base: Path) -> Iterator[ComfyServer]:
    """One server for all modules that do no harm to it. Its workers stay as long as consecutive tests name the same devices."""
    # SP_VERIFY_RANKS: a forward whose ranks differ in one bit is an error
    with ComfyServer(comfyui, base, "--cpu", environment={"SP_VERIFY_RANKS": "1"}) as server:
        yield server


# -- a server of a module's own, where the tests harm it or want it otherwise; a module overrides what it wants otherwise ----------


@pytest.fixture(scope="module")
def own(comfyui: Path, own_base: Path, own_flags: tuple[str, ...], own_environment: dict[str, str]) -> Iterator[ComfyServer]:
    """A server that only the tests of this module see."""
    with ComfyServer(comfyui, own_base, "--cpu", *own_flags, environment=own_environment) as server:
        yield server


@pytest.fixture(scope="module")
def own_base(base: Path) -> Path:
    return base


@pytest.fixture(scope="module")
def own_flags() -> tuple[str, ...]:
    return ()


@pytest.fixture(scope="module")
def own_environment() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for what the servers and workers of this module leave: their TMPDIR, where the module says so."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture
def require(server: ComfyServer) -> Callable[[Case], None]:
    """Skips a case that asks for nodes or inputs which this ComfyUI does not have."""

    def check(case: Case) -> None:
        lacks = sorted({reason for node in nodes_of(case) for reason in _lacking(server, node["class_type"], node["inputs"])})
        if lacks:
            pytest.skip(f"ComfyUI {server.get('/system_stats')['system'].get('comfyui_version')} has no {', '.join(lacks)}")

    return check


def _lacking(server: ComfyServer, class_type: str, inputs: dict[str, Any]) -> Iterator[str]:
    info = server.get(f"/object_info/{class_type}").get(class_type)
    if info is None:
        yield f"node {class_type}"
        return
    known = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    for name, value in inputs.items():
        if name not in known:
            yield f"input {name} of {class_type}"
        elif isinstance(value, (int, float)) and len(known[name]) > 1 and value > known[name][1].get("max", value):
            yield f"{name} {value} of {class_type}"
