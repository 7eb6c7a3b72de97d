"""Four ranks over shared memory, of which a test lets some misbehave; they stay alive, so that only a process that is killed is gone."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import fast_context

from sp_core.comm.errors import ExchangeError
from sp_core.comm.transports.shm import ShmTransport

COUNTS = (3, 2, 2, 2)


def enter(rank: int, store: str, results: multiprocessing.Queue, behave: Callable[[int, ShmTransport], None], timeout_s: float) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4, timeout=timedelta(seconds=240))
    transport = ShmTransport.create(timeout_s=120)
    for _ in range(3):
        exchange(rank, transport)
    dist.barrier()
    transport.timeout_s = timeout_s
    try:
        behave(rank, transport)
        outcome = "delivered", None, ""
    except ValueError as error:
        outcome = "refused", None, str(error)
    except ExchangeError as error:
        outcome = "failed", error.rank, str(error)
    results.put((rank, *outcome))
    results.close()
    results.join_thread()
    time.sleep(240)  # stays alive: only the process that a test kills is gone


def exchange(rank: int, transport: ShmTransport, B: int = 1, D: int = 5) -> torch.Tensor:
    return transport.scatter_heads([torch.full((B, COUNTS[rank], 8, D), float(rank))], COUNTS)[0]


Report = tuple[str, int | None, str]


def outcomes(behave: Callable[[int, ShmTransport], None], ranks: int, timeout_s: float = 100) -> dict[int, Report]:
    """(outcome, rank at fault, message) of the first ``ranks`` ranks that report."""
    context = fast_context()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        processes = [context.Process(target=enter, args=(rank, store, results, behave, timeout_s), daemon=True) for rank in range(4)]
        for process in processes:
            process.start()
        try:
            reports = [results.get(timeout=240) for _ in range(ranks)]
        except Empty:
            pytest.fail("a rank hangs")
        finally:
            for process in processes:
                process.kill()
                process.join()
    return {rank: report for rank, *report in reports}  # type: ignore[misc]
