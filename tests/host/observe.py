"""What the tests of memory and faults look at from outside: processes, sockets, files, and the host's own status route."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaign import CAMPAIGN, within
from host.graphs import Branch, Graph, Link, Result, latent, load, read, sample, text
from leftovers import alive, left, memory_files

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

SEED = int(os.environ.get("SP_CAMPAIGN_SEED", "20"))
DIM = 4096

Change = Callable[[Branch, Link], Link]


def count(short: int, full: int) -> int:
    return full if CAMPAIGN else short


def dice() -> random.Random:
    return random.Random(SEED)


# -- prompts ------------------------------------------------------------------------------


def video(
    devices: str | None,
    name: str = "tiny_wan_t2v",
    shape: str = "1,16,3,10,14",
    change: Change = lambda branch, model: model,
    after: Change = lambda branch, samples: samples,
    keep_loaded: str | None = None,
    **settings: Any,
) -> tuple[dict[str, Any], str]:
    """A prompt that samples one video, and the id of the node that saves it.

    ``change`` adds nodes between the loader and SP Model Patch, ``after`` behind the sampler.
    """
    branch = Branch(Graph(), devices)
    model = branch.patch(change(branch, load(branch, name)))
    if keep_loaded is not None:
        branch.graph.prompt[model[0]]["inputs"]["keep_loaded"] = keep_loaded
    samples = after(branch, sample(branch, model, text(branch, DIM), latent(branch, shape), **settings))
    saved = branch.add("SPTestSaveLatent", samples=samples, name=f"observed-{time.monotonic_ns()}")
    return branch.graph.prompt, saved.id


def run(server: ComfyServer, prompt: dict[str, Any], node: str) -> Result:
    return read(server.run(prompt)[node])


@contextlib.contextmanager
def timed() -> Iterator[Callable[[], float]]:
    started = time.monotonic()
    yield lambda: time.monotonic() - started


def failure(server: ComfyServer, prompt_id: str) -> tuple[str, float]:
    """What the UI shows of a prompt that fails, and the seconds until it does."""
    with timed() as seconds:
        try:
            server.wait(prompt_id)
        except PromptFailed as error:
            return str(error), seconds()
    raise AssertionError("the prompt did not fail")


# -- workers ------------------------------------------------------------------------------


def status(server: ComfyServer) -> dict[str, Any]:
    return server.get("/sp/status")


def workers(server: ComfyServer) -> list[dict[str, Any]]:
    return status(server)["workers"]


def pids(server: ComfyServer) -> list[int]:
    return [worker["pid"] for worker in workers(server) if worker["pid"]]


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Until the condition holds: ``seconds`` at most in a campaign, or, in a plain run, until it is taken to hang."""
    started = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - started < within(seconds), f"not within {within(seconds):.0f} s: {what}"
        time.sleep(0.02)
    return found


def holds_within(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether the condition holds before these seconds are over."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


# -- leftovers ----------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_is_left(server: ComfyServer, temporary: Path) -> Iterator[None]:
    """What the block does ends the workers; 5 s later no process, no memory file and no folder of theirs is there."""
    old, files = pids(server), memory_files([server.process.pid])
    folders = [temporary / name for name in private_directories(temporary)]
    assert old and files and folders, "no pool runs"
    yield
    started = time.monotonic()
    if not holds_within(lambda: not left(old, files, folders), within(5)):
        raise AssertionError(f"{within(5):.0f} s later there is left: {left(old, files, folders)}")
    print(f"\nall gone after {time.monotonic() - started:.1f} s")


def private_directories(temporary: Path) -> list[str]:
    return sorted(path.name for path in temporary.glob("comfyui-sp-*-*"))


def open_things(pid: int) -> dict[str, int]:
    """Sockets and shared memory that a process holds."""
    found = {"sockets": 0, "memory files": 0}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            found["sockets"] += target.startswith("socket:")
            found["memory files"] += target.startswith("/memfd:sp-")
    return found


def children(pid: int) -> list[int]:
    """Living child processes, whatever they are."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if alive(child)]
