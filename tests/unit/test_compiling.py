"""What becomes of a wish to compile: what is granted, what is changed about it, and what people are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_core import settings
from sp_core.host.compiled import plain_wish
from sp_core.host.ui.progress import Watcher
from sp_core.host.worker.compiling import TRACED_S, Granted, compile_phase, wish_of
from sp_core.plans.block_compiler import BlockCompiler, CompileWish
from sp_core.plans.forward_state import ForwardState
from sp_core.pool.errors import PeerFailed, WorkerTimeout
from sp_core.pool.request import Request
from sp_core.pool.shared_buffer import SharedBuffer
from sp_core.pool.shared_state import Phase, SharedState
from sp_core.pool.worker import WorkerContext


@pytest.mark.parametrize(
    ("asked", "wish", "said"),
    [
        ({}, CompileWish("inductor"), ""),
        ({"mode": "default", "dynamic": False, "fullgraph": True}, CompileWish("inductor", None, False, True), ""),
        ({"mode": "reduce-overhead"}, CompileWish("inductor"), "reduce-overhead became default"),
        ({"mode": "max-autotune"}, CompileWish("inductor", "max-autotune-no-cudagraphs"), "max-autotune became max-autotune-no-cudagraphs"),
        ({"mode": "max-autotune-no-cudagraphs"}, CompileWish("inductor", "max-autotune-no-cudagraphs"), ""),
        (
            {"options": {"triton.cudagraphs": True, "max_autotune": True}},
            CompileWish(options=(("max_autotune", True),)),
            "cudagraphs is off",
        ),
        ({"options": {"triton.cudagraphs": False}}, CompileWish(), ""),
        ({"backend": "cudagraphs"}, None, "CUDA graphs cannot hold an exchange"),
        ({"backend": "aot_eager"}, CompileWish("aot_eager"), ""),
    ],
)
def test_wishes(asked: dict[str, Any], wish: CompileWish | None, said: str) -> None:
    granted, changed = wish_of(plain_wish(asked))
    assert granted == wish
    assert said in changed and bool(said) == bool(changed)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_told() -> None:
    state = ForwardState(0, 2)
    assert Granted().told(state) == ""
    assert Granted(None, "because").told(state) == "torch.compile: not compiled: because"
    compiler = BlockCompiler(CompileWish("eager", dynamic=True))
    assert Granted(compiler).told(state) == "torch.compile (eager, dynamic true): nothing was compiled"
    assert torch.equal(compiler.compiled(double)(torch.ones(3)), 2 * torch.ones(3))
    state.note_uncompiled("an object for a mask")
    told = Granted(compiler, "changed").told(state)
    assert told.startswith("torch.compile (eager, dynamic true): 1 graph in ")
    assert told.endswith(" s; not compiled: an object for a mask; changed")
    assert Granted(compiler).told(state, [1, 3]).endswith("; compiling failed on rank 1 and 3, whose lines in the console say why")


def test_a_backend_that_fails_or_that_nobody_knows_leaves_the_graph_as_it_is() -> None:
    compiler = BlockCompiler(CompileWish("no such backend"))
    assert torch.equal(compiler.compiled(double)(torch.ones(3)), 2 * torch.ones(3))
    assert "torch.compile failed: no such backend: " in compiler.describe({})
    assert compiler.refused(double) and not compiler.refused(torch.sin)


# -- the phase --------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedState]:
    buffer = SharedBuffer.create(tmp_path, "shared_state", SharedState.nbytes(2))
    yield SharedState(buffer, 2)
    buffer.close()


def rank_1(shared: SharedState) -> WorkerContext:
    context = WorkerContext(1, 2, torch.device("cpu"), shared, Path("."), Any)  # type: ignore[arg-type]
    context.begin(3)
    context.own_state.collective_seq = 5
    return context


@pytest.mark.parametrize("ends", ["the leader comes to its exchange", "the leader is done", "the leader failed"])
def test_a_rank_waits_for_the_leaders_graph(shared: SharedState, ends: str) -> None:
    context, leader = rank_1(shared), shared.ranks[0]
    leader.collective_seq = 5
    leader.show(Phase.COMPILING)
    entered, failures = threading.Event(), []

    def compile_on_rank_1() -> None:
        try:
            with compile_phase(context, 0):
                entered.set()
        except PeerFailed as error:
            failures.append(error)

    thread = threading.Thread(target=compile_on_rank_1)
    thread.start()
    time.sleep(0.1)
    assert not entered.is_set() and context.own_state.phase is Phase.COMPILING
    if ends == "the leader comes to its exchange":
        leader.show(Phase.COMPUTING)
        leader.enter_collective()
    elif ends == "the leader is done":
        leader.show(Phase.IDLE)
    else:
        shared.abort(3)
    thread.join(5)
    assert not thread.is_alive() and context.own_state.phase is Phase.COMPUTING
    assert bool(failures) == (ends == "the leader failed")


def test_nobody_waits_for_a_leader_that_is_ahead_or_where_it_leads_itself(shared: SharedState) -> None:
    context, leader = rank_1(shared), shared.ranks[0]
    leader.show(Phase.COMPUTING)
    leader.collective_seq = 6
    with compile_phase(context, 0):
        pass
    leader.collective_seq = 5
    with compile_phase(context, 1):
        pass


def test_nobody_waits_for_ever_for_a_leader_that_compiles_nothing(shared: SharedState, monkeypatch: pytest.MonkeyPatch) -> None:
    context, now = rank_1(shared), 0.0
    shared.ranks[0].show(Phase.COMPUTING)

    def sleep(_: float) -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    with compile_phase(context, 0):
        assert TRACED_S < now < TRACED_S + 3


@pytest.mark.parametrize(("phase", "late"), [(Phase.COMPILING, False), (Phase.COMPUTING, True)])
def test_compiling_has_a_limit_of_its_own(shared: SharedState, phase: Phase, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.STALL_TIMEOUT, "10")
    monkeypatch.setenv(settings.COMPILE_TIMEOUT, "100")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    workers: Any = SimpleNamespace(ask_for_traces=lambda ranks: None, keep_log=lambda rank: "log")
    shared.ranks[0].show(Phase.COMPUTING)
    shared.ranks[1].show(phase)
    request, looks = Request(7, "testing", workers, shared), 0

    def incoming() -> Iterator[Any]:
        nonlocal now, looks
        now, looks = now + 30, looks + 1
        yield from ()

    with pytest.raises(WorkerTimeout, match="SP_TIMEOUT_S" if late else "SP_COMPILE_TIMEOUT_S"):
        request.collect(incoming, None)
    assert looks == (1 if late else 4)


def test_the_line_says_that_a_rank_compiles(shared: SharedState) -> None:
    watcher = object.__new__(Watcher)
    watcher.doing = "a forward of WanModel"
    shared.ranks[0].show(Phase.COMPUTING, 0, 4)
    shared.ranks[1].show(Phase.COMPILING, 0, 4)
    pool: Any = SimpleNamespace(usable=True, shared_state=shared, world_size=2)
    assert watcher.line(pool).startswith("SP: a forward of WanModel, compiling")
