"""What the plain collective copies and holds: every pass over a tensor and every byte beside the outputs is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from campaign import parameters
from distributed.ranks import RankPools
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_core.comm import CollectiveTransport
from sp_core.layout import shard_sizes


class Traffic(TorchDispatchMode):
    """Counts bytes that operators write here, and the most bytes of new tensors that were alive at once.

    What a collective writes is the wire's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            return result
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        new = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given]
        aliases = [argument.alias_info for argument in func._schema.arguments]
        changed = [x for x, alias in zip(args, aliases, strict=False) if alias is not None and alias.is_write]
        self.written += sum(x.nbytes for x in (changed or ([] if "empty" in func.name() else new)))
        for tensor in new:
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for reference, size in self._alive.values() if not reference.expired()))
        return result


def copied_and_held(rank: int, world_size: int, batch: int, tokens: int, heads: int) -> tuple[list[float], list[float]]:
    """(passes over one tensor, copies of the inputs held beside the outputs) of an attention's two exchanges."""
    transport, D = CollectiveTransport(), 64
    counts = shard_sizes(tokens, world_size)
    shards = [torch.randn(batch, counts[rank], heads, D) for _ in range(3)]
    passes, held = [], []
    with Traffic() as scattering:
        scattered = transport.scatter_heads(shards, counts)
    given, got = sum(x.nbytes for x in shards), sum(x.nbytes for x in scattered)
    passes.append(scattering.written / shards[0].nbytes)
    held.append((scattering.peak - got) / given)
    with Traffic() as gathering:
        back = transport.gather_heads(scattered[0], heads, counts)
    assert torch.equal(back, shards[0])
    passes.append(gathering.written / shards[0].nbytes)
    held.append((gathering.peak - back.nbytes) / back.nbytes)
    return passes, held


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("world_size", "tokens", "heads"), parameters(plain=[(2, 512, 32), (3, 500, 32)], campaign=[(3, 513, 40), (4, 1023, 19)])
)
def test_four_passes_and_one_copy(ranks: RankPools, world_size: int, tokens: int, heads: int, batch: int) -> None:
    for passes, held in ranks.call(world_size, copied_and_held, batch, tokens, heads):
        assert passes == [3, 1]
        # one tensor is packed at a time; a thread of gloo may hold one that it has sent for a moment longer
        assert 0 < held[0] <= 1
        assert 0 < held[1] <= 1


def test_a_small_exchange_is_one_collective(ranks: RankPools) -> None:
    assert ranks.call(2, collectives_called, 16) == [1, 1]
    assert ranks.call(2, collectives_called, 20_000) == [3, 3]


def collectives_called(rank: int, world_size: int, tokens: int) -> int:
    transport, calls = CollectiveTransport(), []
    plain = transport._all_to_all
    transport._all_to_all = lambda *arguments: (calls.append(1), plain(*arguments))[1]  # type: ignore[method-assign]
    counts = shard_sizes(tokens, world_size)
    whole = torch.arange(3 * tokens * 5 * 8.0).view(3, 1, tokens, 5, 8)
    first = sum(counts[:rank])
    scattered = transport.scatter_heads(list(whole[:, :, first : first + counts[rank]]), counts)
    heads = slice(0, 3) if rank == 0 else slice(3, 5)
    assert all(torch.equal(x, y[:, :, heads]) for x, y in zip(scattered, whole, strict=True))
    return len(calls)
