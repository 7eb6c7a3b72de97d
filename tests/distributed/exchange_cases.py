"""Generated exchange cases, and the check of one case that any transport has to pass.

Elements are random bytes, so every bit pattern occurs, NaN payloads included, and results
are compared as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from sp_core.comm import Transport
from sp_core.comm.registry import TRANSPORTS
from sp_core.layout import shard_range, shard_sizes

#: for tests that name them, so that a transport that comes to the registry changes nothing there
SHM_AND_GLOO = [row for row in TRANSPORTS if row.name in ("shm", "gloo")]

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


@dataclass(frozen=True)
class ExchangeCase:
    token_counts: tuple[int, ...]
    #: heads of each call: one group, or e.g. 19, 19 and 18 of 56
    head_groups: tuple[int, ...]
    head_dim: int
    batch: int
    tensors: int
    dtype: str
    #: the shard is a transposed (B, H, t, D), as models often hand over
    transposed: bool
    seed: int
    #: of the heads; empty: equal shares
    weights: tuple[int, ...] = ()


def exchange_cases(world_size: int) -> st.SearchStrategy[ExchangeCase]:
    flat = st.integers(0, 40).map(lambda tokens: shard_sizes(2 * tokens + 1, world_size))
    ragged = st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size).map(tuple)
    few = st.integers(1, world_size).map(lambda heads: (heads,))
    heads = st.integers(1, 56).map(lambda heads: (heads,))
    groups = st.sampled_from([(19, 19, 18), (1, 2, 4), (20, 20, 16)])
    return st.builds(
        ExchangeCase,
        token_counts=flat | ragged,
        head_groups=heads | few | groups,
        head_dim=st.sampled_from([1, 3, 4, 8, 16]),
        batch=st.integers(1, 3),
        tensors=st.integers(1, 3),
        dtype=st.sampled_from(DTYPES),
        transposed=st.booleans(),
        seed=st.integers(0, 2**31),
        weights=st.just(()) | st.lists(st.sampled_from([1, 2, 3, 5, 50]), min_size=world_size, max_size=world_size).map(tuple),
    )


def same_bytes(have: Tensor, want: Tensor) -> bool:
    if have.shape != want.shape or have.dtype != want.dtype:
        return False
    return torch.equal(have.contiguous().flatten().view(torch.uint8), want.contiguous().flatten().view(torch.uint8))


def check_exchange(transport: Transport, case: ExchangeCase) -> str | None:
    """Exchange, inverse and gather of one case on this rank; what is wrong, or None.

    Every collective runs before anything is judged, so ranks stay in step.
    """
    rank, world_size, faults = transport.rank, transport.world_size, []
    dtype, T, H = getattr(torch, case.dtype), sum(case.token_counts), sum(case.head_groups)
    size = case.tensors * case.batch * T * H * case.head_dim * dtype.itemsize
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(case.seed))
    whole_nBTHD = data.view(dtype).view(case.tensors, case.batch, T, H, case.head_dim)
    start = sum(case.token_counts[:rank])
    mine_nBtHD = whole_nBTHD[:, :, start : start + case.token_counts[rank]]
    if case.transposed:
        mine_nBtHD = mine_nBtHD.transpose(2, 3).contiguous().transpose(2, 3)

    transport.stats.reset()
    sent, first = 0, 0
    for heads in case.head_groups:
        group = slice(first, first + heads)
        owned = shard_sizes(heads, world_size, case.weights) if case.weights else None
        low, high = (first + edge for edge in shard_range(heads, world_size, rank, case.weights or None))
        scattered = transport.scatter_heads([tensor[:, :, group] for tensor in mine_nBtHD], case.token_counts, owned)
        back = [transport.gather_heads(tensor, heads, case.token_counts, owned) for tensor in scattered]
        storages = [tensor.untyped_storage()._cdata for tensor in (mine_nBtHD, *scattered, *back)]
        if world_size > 1 and len(set(storages)) < len(storages):
            faults.append("outputs share memory")
        for index in range(case.tensors):
            if not same_bytes(scattered[index], whole_nBTHD[index, :, :, low:high]) or not scattered[index].is_contiguous():
                faults.append(f"tensor {index}, heads {low} to {high}: exchange")
            if not same_bytes(back[index], mine_nBtHD[index, :, :, group]):
                faults.append(f"tensor {index}, heads {low} to {high}: inverse")
        token_bytes = case.tensors * case.batch * case.head_dim * dtype.itemsize
        away = case.token_counts[rank] * (heads - (high - low)) + (T - case.token_counts[rank]) * (high - low)
        sent, first = sent + away * token_bytes, first + heads
    gathered = transport.all_gather_tokens(mine_nBtHD[0], case.token_counts)
    # shards of a gather are padded to the longest
    sent += max(case.token_counts) * (world_size - 1) * case.batch * H * case.head_dim * dtype.itemsize
    if transport.stats.bytes_sent != sent:
        faults.append(f"counted {transport.stats.bytes_sent} bytes where {sent} left the rank")
    if not same_bytes(gathered, whole_nBTHD[0]):
        faults.append("all_gather_tokens")
    return "; ".join(faults) or None
