"""What every transport does alike because the base class does it: counting, saying that its rank waits, refusing wrong arguments.

All rows of the registry that move CPU tensors are driven, bare and staged through main memory.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from campaign import parameters
from distributed.exchange_cases import ExchangeCase, check_exchange
from distributed.ranks import run_ranks
from torch import Tensor

from sp_core.comm import Transport, ops
from sp_core.comm.choice import make_transport
from sp_core.comm.errors import ExchangeError
from sp_core.comm.registry import TRANSPORTS, TransportRow, TransportSpec, staged
from sp_core.layout import shard_sizes
from sp_core.parallel.groups import ParallelGroupsCache
from sp_core.planner.degrees import Degrees

ROWS = {row.name: row for cpu_row in TRANSPORTS if cpu_row.device == "cpu" for row in (cpu_row, staged(cpu_row))}
every_transport = pytest.mark.parametrize("name", ROWS)

COUNTS, H, D, B = (5, 3, 0), 7, 4, 2


def made(name: str, group: dist.ProcessGroup | None = None) -> Transport:
    return ROWS[name].make(TransportSpec(group, torch.device("cpu"), timeout_s=60))


def qkv(rank: int) -> list[Tensor]:
    return [torch.randn(B, COUNTS[rank], H, D) for _ in range(3)]


def exchanges_of_a_forward(rank: int, world_size: int, name: str) -> tuple[int, int, bool, int]:
    """(exchanges, bytes beyond what the shapes say, whether time was counted, how often the rank said that it waits)."""
    entered: list[int] = []

    def make(group: dist.ProcessGroup) -> Transport:
        transport = made(name, group)
        transport.on_enter = lambda: entered.append(1)
        return transport

    cache = ParallelGroupsCache(make, timedelta(seconds=60))
    groups = cache.build(Degrees(1, 1, world_size))
    assert groups is not None
    transport = groups.sequence.ulysses
    attended, _, _ = transport.scatter_heads(qkv(rank), COUNTS)
    back = transport.gather_heads(attended, H, COUNTS)
    transport.all_gather_tokens(back[..., 0, :2], COUNTS)
    transport.check()
    t, T, h = COUNTS[rank], sum(COUNTS), shard_sizes(H, world_size)[rank]
    head_bytes = B * D * 4
    sent = 3 * t * (H - h) * head_bytes + (T - t) * h * head_bytes + max(COUNTS) * B * 2 * 4 * (world_size - 1)
    stats = groups.sequence.stats
    result = stats.exchanges, stats.bytes_sent - sent, stats.seconds > 0, len(entered)
    cache.close()
    return result


@every_transport
def test_what_a_report_reads_counts_every_exchange(name: str) -> None:
    assert run_ranks(3, exchanges_of_a_forward, name) == [(3, 0, True, 4)] * 3


def refusals(rank: int, world_size: int, name: str) -> list[str]:
    """Sentences of wrong calls, all ranks being wrong alike, each on a transport of its own."""
    x, t = torch.zeros(1, 4, 6, 2), [4, 4]
    calls: list[Callable[[Transport], object]] = [
        lambda transport: transport.scatter_heads([x], [4, 4, 4]),
        lambda transport: transport.scatter_heads([x], [3, 3]),
        lambda transport: transport.scatter_heads([x[0]], t),
        lambda transport: transport.scatter_heads([x, x.double()], t),
        lambda transport: transport.gather_heads(x, 6, t),
        lambda transport: transport.gather_heads(x, 6, [2, 2]),
        lambda transport: transport.all_gather_tokens(x, [4, 4, 4]),
        lambda transport: transport.all_gather_tokens(x, [3, 3]),
    ]
    sentences = []
    for call in calls:
        transport = made(name)
        with pytest.raises(ValueError, match=f"^rank {rank}") as caught:
            call(transport)
        sentences.append(str(caught.value).removeprefix(f"rank {rank}"))
        assert transport.stats.exchanges == 0
        transport.close()
    return sentences


@every_transport
def test_wrong_arguments_are_refused_in_the_same_words(name: str) -> None:
    both_shapes = "[((1, 4, 6, 2), 'torch.float32'), ((1, 4, 6, 2), 'torch.float64')]"
    sentences = [
        ": got 3 token counts for 2 ranks (scatter_heads)",
        ": got 4 tokens, but was to bring 3 of [3, 3] (scatter_heads)",
        ": tensors need four dimensions (batch, tokens, heads, head_dim), got (4, 6, 2) (scatter_heads)",
        f": tensors of one exchange need one shape and dtype, got {both_shapes} (scatter_heads)",
        ": got 4 tokens, but was to bring 8 of [4, 4] (gather_heads)",
        " owns 3 of 6 heads, but dim 2 has 6 (gather_heads)",
        ": got 3 token counts for 2 ranks (all_gather_tokens)",
        ": got 4 tokens, but was to bring 3 of [3, 3] (all_gather_tokens)",
    ]
    assert run_ranks(2, refusals, name) == [sentences] * 2


def one_rank_is_wrong(rank: int, world_size: int, name: str) -> tuple[str, str]:
    transport = made(name)
    x = torch.zeros(1, 4 if rank == 0 else 5, 6, 2)
    with pytest.raises(ValueError if rank == 1 else ExchangeError) as first:
        transport.scatter_heads([x], [4, 4])
    with pytest.raises(ExchangeError) as then:
        transport.scatter_heads([x[:, :4]], [4, 4])
    transport.close()
    return str(first.value), str(then.value)


@pytest.mark.parametrize("name", ["shm", "staged-shm"])
def test_a_rank_with_wrong_arguments_releases_the_others(name: str) -> None:
    (here, here_then), (there, there_then) = run_ranks(2, one_rank_is_wrong, name)
    problem = "rank 1: got 5 tokens, but was to bring 4 of [4, 4] (scatter_heads)"
    assert there == problem
    assert here == f"rank 1 gave up: {problem}"
    assert here_then == f"rank 0 cannot exchange any more: {here}"
    assert there_then == f"rank 1 cannot exchange any more: {problem}"


def too_many_tensors(rank: int, world_size: int, name: str) -> str:
    transport = made(name)
    with pytest.raises(ValueError, match="travel together") as caught:
        transport.scatter_heads([torch.zeros(1, 4, 6, 2)] * 9, [4, 4])
    transport.close()
    return str(caught.value)


@pytest.mark.parametrize("name", ["shm", "staged-shm"])
def test_more_tensors_than_one_exchange_carries_are_refused(name: str) -> None:
    assert run_ranks(2, too_many_tensors, name)[1] == "rank 1: at most 8 tensors travel together, got 9 (scatter_heads)"


def limit_of_a_wait(rank: int, world_size: int, setting: str) -> float:
    os.environ["SP_TIMEOUT_S"] = setting
    with tempfile.TemporaryDirectory() as directory:
        shm = [row for row in TRANSPORTS if row.name == "shm"]
        transport, _ = make_transport(None, "cpu", directory=directory, rows=shm)
        limit = transport.inner.timeout_s  # type: ignore[attr-defined]
        transport.close()
    return limit


@pytest.mark.parametrize(("setting", "seconds"), [("ten minutes", 600.0), ("7", 7.0)])
def test_the_limit_of_a_wait_is_the_setting_and_nonsense_is_no_error(setting: str, seconds: float) -> None:
    assert run_ranks(2, limit_of_a_wait, setting) == [seconds] * 2


def storages(tensors: list[Tensor]) -> Iterator[int]:
    return (tensor.untyped_storage()._cdata for tensor in tensors)


def run_operators(rank: int, world_size: int, name: str) -> None:
    # every rank makes the same calls; errors of the check are raised
    transport = ops.traceable(made(name))
    for counts in ([3, 3], [4, 1]):
        heads = shard_sizes(H, world_size)[rank]
        q, k, v = (torch.randn(B, counts[rank], H, D) for _ in range(3))
        assert len(set(storages(transport.scatter_heads([q, k, v], counts)))) == 3
        torch.library.opcheck(ops.scatter_heads, ([q, k, v], counts, heads, transport.number))
        torch.library.opcheck(ops.gather_heads, (torch.randn(B, sum(counts), heads, D), H, counts, rank, transport.number))
        torch.library.opcheck(ops.all_gather_tokens, (q, counts, transport.number))
    transport.close()


@pytest.mark.parametrize("name", parameters(plain=["gloo", "shm"], campaign=[name for name in ROWS if name not in ("gloo", "shm")]))
def test_operators_pass_opcheck_with_q_k_and_v(name: str) -> None:
    run_ranks(2, run_operators, name)


def count_through_a_traceable_transport(rank: int, world_size: int) -> tuple[int, bool]:
    inner = made("gloo")
    cache = ParallelGroupsCache(lambda group: ops.traceable(inner), timedelta(seconds=60))  # type: ignore[arg-type, return-value]
    groups = cache.build(Degrees(1, 1, world_size))
    assert groups is not None
    groups.sequence.ulysses.scatter_heads(qkv(rank), COUNTS)
    assert isinstance(groups.sequence.ulysses, Transport)
    result = groups.sequence.stats.exchanges, inner.stats is groups.sequence.stats
    cache.close()
    return result


def test_a_traceable_transport_counts_where_the_report_looks() -> None:
    assert run_ranks(3, count_through_a_traceable_transport) == [(1, True)] * 3


def test_a_transport_of_cpu_tensors_is_one_of_devices_too() -> None:
    devices = {row.name: row.device for row in TRANSPORTS}
    cpu = [row for row in TRANSPORTS if row.device == "cpu"]
    assert [devices.get(f"staged-{row.name}") for row in cpu] == ["accelerator"] * len(cpu)
    assert all(isinstance(row, TransportRow) and row.make is not None for row in TRANSPORTS)


def transport_of_the_page(rank: int, world_size: int, code: str) -> list[str | None]:
    """Runs the page's file as a module of the transports, its row bare and staged."""
    module: dict[str, Any] = {"__name__": "sp_core.comm.transports.gathered", "__package__": "sp_core.comm.transports"}
    exec(compile(code, "docs/add-a-transport.md", "exec"), module)
    row = TransportRow("gathered", "cpu", lambda spec: module["GatheredTransport"](spec.group))
    case = ExchangeCase(COUNTS, (H,), D, B, 3, "bfloat16", False, 0)
    return [check_exchange(each.make(TransportSpec(None, torch.device("cpu"))), case) for each in (row, staged(row))]


def test_the_page_on_adding_a_transport_has_an_example_that_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "add-a-transport.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    [code] = [block for block in blocks if "class GatheredTransport" in block]
    assert run_ranks(3, transport_of_the_page, code) == [[None, None]] * 3
