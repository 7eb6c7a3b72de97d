"""The operators of a compiled block's attentions, with every transport that needs no GPU; ranks that wait for a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.exchange_cases import SHM_AND_GLOO
from distributed.ranks import run_ranks
from torch import Tensor

from sp_core.attention import operators
from sp_core.attention.sequence_group import SequenceGroup
from sp_core.comm.registry import TransportSpec
from sp_core.layout import FlatLayout
from sp_core.plans.forward_state import Escaped, ForwardState
from sp_core.plans.host_functions import HostFunctions
from sp_core.plans.override import ExchangedAttention
from sp_core.pool.coordinator import Pool
from sp_core.pool.devices import parse_devices
from sp_core.pool.errors import WorkerFailed
from sp_core.pool.launcher import ServiceSpec

HEADS, DIM, TOKENS = 3, 4, 7


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, **_: Any) -> Tensor:
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class Call:
    """A block call with one site."""

    def __init__(self, transport: Any) -> None:
        self.state = ForwardState(transport.rank, transport.world_size)
        self.state.split_by(FlatLayout(TOKENS, transport.world_size))
        self.exchanged = ExchangedAttention(self.state, SequenceGroup.flat(transport), "self", {}, HostFunctions())

    def attend(self, site: int, function: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, options: dict[str, Any]) -> Tensor:
        return (self.exchanged if site == 0 else lambda f, *args, **more: f(*args, **more))(attend, q, k, v, heads, **options)  # type: ignore[no-any-return]

    def escaped(self, site: int) -> None:
        raise Escaped(f"site {site}")


def arguments(q: Tensor, k: Tensor, v: Tensor, site: int, heads_first: bool = False) -> tuple[Any, ...]:
    return (q, k, v, None, HEADS, site, "attend", None, heads_first, heads_first, None, False, None)


def checked(rank: int, world_size: int, name: str, directory: str) -> None:
    row = next(row for row in SHM_AND_GLOO if row.name == name)
    transport = row.make(TransportSpec(None, torch.device("cpu"), directory=directory, timeout_s=60.0))
    whole = torch.randn(3, 2, TOKENS, HEADS * DIM, generator=torch.Generator().manual_seed(1))
    call = Call(transport)
    own = list(call.state.shard(whole, 2).unbind(0))
    with operators.running(call):
        for site in (0, operators.LOCAL):
            torch.library.opcheck(operators.attention, arguments(*own, site))
        first = [x.unflatten(2, (HEADS, DIM)).transpose(1, 2) for x in own]
        torch.library.opcheck(operators.attention, arguments(*first, 0, heads_first=True))  # type: ignore[arg-type]
        out = operators.attention(*arguments(*own, 0))
        torch.testing.assert_close(out, call.state.shard(attend(*whole.unbind(0), HEADS)))
        with pytest.raises(Escaped):
            operators.escaped(out, 0)
    # in each call of the operator one exchange in and one out, whoever called it
    assert transport.stats.exchanges == 2 * call.state.attended
    transport.close()


@pytest.mark.parametrize("name", [row.name for row in SHM_AND_GLOO])
def test_operators(name: str, tmp_path: Any) -> None:
    run_ranks(2, checked, name, str(tmp_path))


def test_no_call_runs() -> None:
    q = torch.ones(1, 2, HEADS * DIM)
    with pytest.raises(RuntimeError, match="outside of a call"):
        operators.attention(*arguments(q, q, q, 0))


# -- a rank fails while another one waits for its graph


def forwards(pool: Pool, fails: bool) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    pool.call("forward", {"fails": fails, "reset": pool.out_of_step}, each=lambda rank, value: told.append(value))
    return told


def test_a_rank_that_waits_for_the_graph_of_one_that_fails(echo_service: None) -> None:
    """It ends with the other one's error and compiles nothing, which can take minutes; the next forward compiles."""
    pool = Pool(parse_devices("cpu:2", "cpu", 0), ServiceSpec("compiling_service:CompilingService"))
    pool.start()
    try:
        with pytest.raises(WorkerFailed, match="Rank 0 failed: out of main memory"):
            forwards(pool, fails=True)
        assert pool.usable, "a rank came too late"
        for rank, told in enumerate(forwards(pool, fails=False)):
            assert (told["before"] == 0) == (rank == 1), "rank 1 compiled the graph that it waited for"
            assert told["graphs"] > 0 and told["refusals"] == {}
            assert max(told["errors"]) <= 2e-5
    finally:
        pool.shutdown()
