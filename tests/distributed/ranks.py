"""Run a function on N spawned CPU ranks joined by a gloo group on the loopback device."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _enter(rank: int, world_size: int, store: str, function: Callable, args: tuple, results: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        results.put((rank, function(rank, world_size, *args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable, *args: Any, timeout: float = 300) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on every rank; results in rank order."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        ranks = [
            context.Process(target=_enter, args=(rank, world_size, store, function, args, results), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        collected: dict[int, Any] = {}
        for _ in range(world_size):
            rank, value, error = results.get()
            if error is not None:
                for process in ranks:
                    process.kill()
                raise AssertionError(f"rank {rank} failed:\n{error}")
            collected[rank] = value
        for process in ranks:
            process.join(timeout)
    return [collected[rank] for rank in range(world_size)]
