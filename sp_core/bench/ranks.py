"""Ranks of a benchmark: processes joined in one group, whose rows rank 0 hands out as they are measured."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from ..comm.small_collectives import all_gather_ints


def rows_of_ranks(ranks: int, backend: str, rows: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
    """Spawns the ranks and yields each of rank 0's rows when it has been measured.

    Args:
        backend: of the default group.
        rows: a function of a module that every rank calls, with a folder that all share and ``arguments``; collective.

    Raises:
        RuntimeError: a rank ended early; its own error is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory(prefix="sp_bench_") as directory:
        shared = (ranks, directory, backend, results, rows, arguments)
        processes = [context.Process(target=_run_rank, args=(rank, *shared), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            while (row := _next_row(results, processes)) is not None:
                yield row
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def _next_row(results: Queue, processes: Sequence[BaseProcess]) -> Any:
    while True:
        try:
            return results.get(timeout=1)
        except Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError(f"ranks ended with {[process.exitcode for process in processes]}") from None


def _run_rank(
    rank: int, world_size: int, directory: str, backend: str, results: Queue, rows: Callable[..., Iterator[Any]], arguments: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=5))
    try:
        for row in rows(directory, *arguments):
            if rank == 0:
                results.put(row)
        if rank == 0:
            results.put(None)
        all_gather_ints(None, [0])  # no rank leaves while another may still need it
    finally:
        dist.destroy_process_group()


def span_ms(call: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Milliseconds from the first rank's start to the last rank's end of so many calls. Collective, on one machine with one clock."""
    all_gather_ints(None, [0])
    started = time.monotonic_ns()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ended = time.monotonic_ns()
    spans = all_gather_ints(None, [started, ended])
    return (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e6
