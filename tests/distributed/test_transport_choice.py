"""Which transport a group gets: the decision, the trial, the verification; and compiled models run through it."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed.exchange_cases import SHM_AND_GLOO
from distributed.ranks import run_ranks
from torch import Tensor

from sp_core.comm import CollectiveTransport, ops
from sp_core.comm.choice import decide, facts_of, make_transport
from sp_core.comm.fastest import TIMED_BYTES_CPU, RememberedTimes, figures
from sp_core.comm.native import build
from sp_core.comm.registry import TRANSPORTS, Facts, TransportRow
from sp_core.comm.transports.collective import device_backend
from sp_core.comm.transports.shm import ShmTransport
from sp_core.comm.trial import trial
from sp_core.layout import shard_sizes

CPU = Facts("cpu", "here")
SHIPPED = {"local", "peer", "nccl", "shm", "gloo", "staged-shm", "staged-gloo"}
GPUS = [Facts("cuda", "here", gpu, "cpu:gloo,cuda:nccl") for gpu in "abcd"]


def with_rank_1(facts: Sequence[Facts], **changes: str | dict[str, str]) -> list[Facts]:
    changed = list(facts)
    changed[1] = replace(changed[1], **changes)
    return changed


@pytest.mark.parametrize(
    ("facts", "order", "refused"),
    [
        ([CPU], ("local",), {}),
        ([CPU] * 4, ("shm", "gloo"), {}),
        (with_rank_1([CPU] * 4, lacks={"shm": "no C++ compiler"}), ("gloo",), {"shm": "rank 1: no C++ compiler"}),
        (
            with_rank_1([CPU] * 2, machine_id="there"),
            ("gloo",),
            {"shm": "rank 1 is on another machine than rank 0, or in another container"},
        ),
        (GPUS, ("peer", "nccl", "staged-shm", "staged-gloo"), {}),
        (with_rank_1(GPUS, lacks={"peer": "no CUDA toolkit"}), ("nccl", "staged-shm", "staged-gloo"), {"peer": "rank 1: no CUDA toolkit"}),
        (with_rank_1(GPUS, gpu="a"), ("peer", "staged-shm", "staged-gloo"), {"nccl": "two ranks share a GPU"}),
        (with_rank_1(GPUS, backends="gloo"), ("peer", "staged-shm", "staged-gloo"), {"nccl": "the process group has no device backend"}),
        (
            [Facts("cuda", "here", gpu, "nccl") for gpu in "ab"],
            ("peer", "nccl", "staged-shm"),
            {"staged-gloo": "the process group has no gloo backend"},
        ),
    ],
)
def test_decision(facts: list[Facts], order: tuple[str, ...], refused: dict[str, str]) -> None:
    found = decide(facts)
    # a transport that is added later stands somewhere between these
    assert tuple(name for name in found.order if name in SHIPPED) == order
    assert {name: why for name, why in found.refused if name in SHIPPED} == refused


@pytest.mark.parametrize(
    ("backends", "name"), [("gloo", "gloo"), ("nccl", "nccl"), ("cpu:gloo,cuda:nccl", "nccl"), ("cpu:gloo,xpu:xccl", "xccl")]
)
def test_the_backend_that_a_report_names(backends: str, name: str) -> None:
    assert device_backend(backends) == name


def choose(rank: int, world_size: int, directory: str, no_ext_on: int | None, compiler: str | None) -> tuple[str, str]:
    logging.disable(logging.CRITICAL)
    if rank == no_ext_on:
        os.environ["SP_NO_EXT"] = "1"
    if compiler is not None:
        os.environ |= {"TORCH_EXTENSIONS_DIR": directory, "CXX": compiler}
    transport, reason = make_transport(None, "cpu", directory=directory, rows=SHM_AND_GLOO)
    gathered = transport.all_gather_tokens(torch.full((1, 2, 3), float(rank)), [2] * world_size)
    assert gathered[0, ::2, 0].tolist() == list(range(world_size))
    transport.close()
    return transport.name, reason


def test_cpu_ranks_get_shared_memory(tmp_path: Path) -> None:
    answers = run_ranks(3, choose, str(tmp_path), None, None)
    # every rank has the same figures: those of the slowest one
    assert answers == [answers[0]] * 3
    name, reason = answers[0]
    assert name == "shm"
    assert re.fullmatch(r"shm, verified; 0\.39 MB take [0-9.]+ ms by shm, [0-9.]+ ms by gloo", reason)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("no_ext_on", "compiler", "reason"),
    [
        (1, None, "rank 1: SP_NO_EXT=1 turns compiled parts off"),
        (None, "no-such-compiler", "no C++ compiler (no-such-compiler) was found"),
        (None, "false", "all2all_cpu.cpp could not be built"),
    ],
)
def test_without_the_compiled_part_all_ranks_get_gloo_and_the_reason(
    no_ext_on: int | None, compiler: str | None, reason: str, tmp_path: Path
) -> None:
    for name, why in run_ranks(2, choose, str(tmp_path), no_ext_on, compiler):
        assert name == "gloo"
        assert reason in why


class Slow(CollectiveTransport):
    """Late on one rank only."""

    def scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
        if self.rank == 1:
            time.sleep(0.05)
        return super().scatter_heads(tensors_BtHD, token_counts)


def times_of_three(rank: int, world_size: int, directory: str) -> tuple[str, str, str, RememberedTimes]:
    """Two transports that come first are slow; what is taken, first and when the times are remembered."""
    logging.disable(logging.CRITICAL)
    slow = [TransportRow(name, "cpu", lambda spec, name=name: Slow(spec.group, name)) for name in ("near", "far")]
    rows = [*slow, *(row for row in TRANSPORTS if row.name == "gloo")]
    remembered: RememberedTimes = {}
    first, reason = make_transport(None, "cpu", directory=directory, rows=rows, remembered=remembered)
    again, reason_again = make_transport(None, "cpu", directory=directory, rows=rows, remembered=remembered)
    assert reason_again == reason
    return first.name, again.name, reason, remembered


def test_the_fastest_is_taken_and_the_times_are_remembered(tmp_path: Path) -> None:
    answers = run_ranks(2, times_of_three, str(tmp_path))
    assert answers[0] == answers[1]
    first, again, reason, remembered = answers[0]
    assert (first, again) == ("gloo", "gloo")
    [(key, times)] = remembered.items()
    assert key == ((0, 1), ("near", "far", "gloo"), TIMED_BYTES_CPU)
    seconds = dict(times)
    assert seconds["near"] > 0.05 and seconds["far"] > 0.05 and seconds["gloo"] < 0.05
    assert reason == f"gloo, verified; {figures(seconds, TIMED_BYTES_CPU)}"


def test_first_exchanges_of_cpu_ranks_cost_little(tmp_path: Path) -> None:
    """Trial and timing of all transports on four ranks; a busy machine may take several times as long."""
    assert min(run_ranks(4, seconds_to_choose, str(tmp_path))) < 3


def seconds_to_choose(rank: int, world_size: int, directory: str) -> float:
    make_transport(None, "cpu", directory=directory)[0].close()  # what is built and loaded once
    started = time.perf_counter()
    make_transport(None, "cpu", directory=directory)[0].close()
    return time.perf_counter() - started


class OneBitOff(CollectiveTransport):
    """Turns the last bit of what it delivers on rank 1 in one element type."""

    def scatter_heads(self, tensors_BtHD: Sequence[Tensor], token_counts: Sequence[int]) -> list[Tensor]:
        outputs = super().scatter_heads(tensors_BtHD, token_counts)
        if self.rank == 1 and outputs[0].dtype == torch.bfloat16:
            outputs[2].view(torch.uint8).flatten()[-1] ^= 1
        return outputs


def find_fault(rank: int, world_size: int) -> tuple[str, str]:
    device = torch.device("cpu")
    return trial(OneBitOff(), None, device), trial(CollectiveTransport(), None, device)


def test_one_wrong_bit_on_one_rank_is_found_on_all() -> None:
    assert run_ranks(3, find_fault) == [("wrong data on rank 1", "")] * 3


class Hops(CollectiveTransport):
    """Fails on one rank only in its last call, so that no rank is left in a collective."""

    def gather_heads(self, tensor_BThD: Tensor, num_heads: int, token_counts: Sequence[int]) -> Tensor:
        output = super().gather_heads(tensor_BThD, num_heads, token_counts)
        if self.rank == 1 and tensor_BThD.dtype is torch.uint8:
            raise torch.distributed.DistBackendError("NCCL error: unhandled system error\nmore lines")
        return output


def without_a_plain_collective(rank: int, world_size: int, directory: str) -> tuple[str, str]:
    """gloo fails its trial: shared memory is still there, and with SP_NO_EXT nothing is."""
    logging.disable(logging.CRITICAL)
    rows = [replace(row, make=lambda spec: Hops(spec.group)) if row.name == "gloo" else row for row in SHM_AND_GLOO]
    transport, reason = make_transport(None, "cpu", directory=directory, rows=rows)
    transport.close()
    return transport.name, reason


def test_a_stock_collective_that_fails_is_passed_over(tmp_path: Path) -> None:
    reason = "shm, verified (not gloo: the first exchange failed on rank 1: NCCL error: unhandled system error)"
    assert run_ranks(2, without_a_plain_collective, str(tmp_path)) == [("shm", reason)] * 2


def test_direct_writes_that_were_turned_off_for_nccl_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    assert facts_of(None, torch.device("cuda", 0)).lacks["peer"] == "NCCL_P2P_DISABLE is set"


def test_workers_that_build_at_once_build_once(tmp_path: Path) -> None:
    program = "from sp_core.comm.native.build import load_cpu; library = load_cpu(); assert library.handle, library.reason"
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    name = f"sp_all2all_cpu_{build._key('all2all_cpu.cpp', build.CPU_FLAGS)}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "lock").touch()  # left by a builder that was killed
    root = Path(__file__).parents[2]
    workers = [subprocess.Popen([sys.executable, "-c", program], cwd=root, env=environment, stderr=subprocess.PIPE) for _ in range(3)]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors.decode()
    assert (tmp_path / name / "finished").exists()


# compiled models


class Attention(torch.nn.Module):
    """A block's exchange with something to compute around it."""

    def __init__(self, transport: ops.TraceableTransport, counts: list[int] | None) -> None:
        super().__init__()
        self.transport, self.counts = transport, counts

    def forward(self, x_BtHD: Tensor) -> Tensor:
        counts = self.counts or [x_BtHD.shape[1]] * self.transport.world_size
        q, k, v = self.transport.scatter_heads([x_BtHD * 2, x_BtHD + 1, x_BtHD - 1], counts)
        attended_BThD = torch.softmax(q * k, dim=1) * v
        back_BtHD = self.transport.gather_heads(attended_BThD, x_BtHD.shape[2], counts)
        return self.transport.all_gather_tokens(back_BtHD + x_BtHD, counts)


def compiled(rank: int, world_size: int, even: bool) -> int:
    """Compiles without a graph break, twice for two sizes where the token count may vary; returns how many graphs."""
    transport = ops.traceable(ShmTransport.create())
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]):
        graphs.append(graph)
        return graph.forward

    sizes = (16, 12, 20) if even else (7,)  # not H or D: equal sizes share a symbol
    for number, tokens in enumerate(sizes):
        counts = list(shard_sizes(tokens, world_size))
        model = Attention(transport, None if even else counts)
        if number == 0:
            run = torch.compile(model, fullgraph=True, backend=backend, dynamic=even)
        generator = torch.Generator().manual_seed(rank)
        x_BtHD = torch.randn(1, counts[rank], 3, 4, generator=generator)
        assert torch.equal(run(x_BtHD), model(x_BtHD))
    transport.close()
    return len(graphs)


@pytest.mark.parametrize("even", [True, False])
def test_compiles_without_a_graph_break(even: bool) -> None:
    assert run_ranks(2, compiled, even) == [1, 1]


def check_operators_alone(rank: int, world_size: int) -> None:
    transport = ops.traceable(CollectiveTransport())
    for op, arguments in ((ops.scatter_heads, ([torch.randn(1, 2, 3, 4)], [2], 3)), (ops.all_gather_tokens, (torch.randn(1, 2, 3), [2]))):
        torch.library.opcheck(op, (*arguments, transport.number))


def test_opcheck_passes_on_one_rank() -> None:
    run_ranks(1, check_operators_alone)
