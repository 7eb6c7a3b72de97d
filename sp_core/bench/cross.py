"""Video-to-audio attention in two forms: keys and values are exchanged, or partial results are merged.

Both give the same numbers. One sample lasts from the first rank's start to the last rank's
end; the two forms take turns, so that a busy machine is equally busy for both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist

from ..attention.partial import exchanged_cross_attention, partial_cross_attention
from ..comm.transport import Transport
from ..comm.transports.collective import CollectiveTransport
from ..layout import shard_sizes

#: LTX-2: audio queries, heads, head_dim
QUERIES, HEADS, HEAD_DIM = 126, 32, 64
#: video tokens of 768x512x121, 1280x704x121 and 1920x1088x121
TOKENS = (6_144, 14_080, 32_640)
SAMPLES = 7
WARM_UP = 2


@dataclass(frozen=True)
class CrossRow:
    """Both forms at one video length. Milliseconds are medians, bytes are what rank 0 sent."""

    tokens: int
    dtype: str
    partial_ms: float
    exchanged_ms: float
    partial_bytes: int
    exchanged_bytes: int
    #: largest difference of the two results, over the largest result
    difference: float


def compare(transport: Transport, tokens: int, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> CrossRow:
    """Measure both forms on ``transport``; collective. For N > 1 ranks of the default group."""
    counts = shard_sizes(tokens, transport.world_size)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, QUERIES, HEADS, HEAD_DIM, generator=generator).to(device, dtype)
    generator.manual_seed(transport.rank + 1)
    keys, values = (torch.randn(1, counts[transport.rank], HEADS, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(2))

    def call(form: Callable) -> tuple[torch.Tensor, float, int]:
        before = transport.stats.bytes_sent
        dist.barrier()
        started = time.perf_counter()
        out = form(query, keys, values, transport, counts)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        ended = time.perf_counter()
        # one machine, one clock
        span = torch.tensor([-started, ended], dtype=torch.float64)
        dist.all_reduce(span, dist.ReduceOp.MAX)
        return out, float(span.sum()) * 1e3, transport.stats.bytes_sent - before

    forms = (partial_cross_attention, exchanged_cross_attention)
    runs = [[call(form) for form in forms] for _ in range(WARM_UP + SAMPLES)]
    partial_ms, exchanged_ms = (statistics.median(run[index][1] for run in runs[WARM_UP:]) for index in range(2))
    (partial, _, partial_bytes), (exchanged, _, exchanged_bytes) = runs[-1]
    difference = float((partial.float() - exchanged.float()).abs().max() / exchanged.float().abs().max())
    return CrossRow(tokens, str(dtype).removeprefix("torch."), partial_ms, exchanged_ms, partial_bytes, exchanged_bytes, difference)


def measure(ranks: int, lengths: Sequence[int] = TOKENS) -> list[CrossRow]:
    """Spawns CPU ranks joined by gloo, measures every length, returns rank 0's rows."""
    context = multiprocessing.get_context("spawn")
    results: SimpleQueue = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="sp_bench_") as directory:
        processes = [
            context.Process(target=_run_rank, args=(rank, ranks, directory, tuple(lengths), results), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"ranks ended with {[process.exitcode for process in processes]}")
        return results.get()


def format_rows(rows: Sequence[CrossRow]) -> list[str]:
    """A table for people."""
    lines = ["video tokens   partial ms  exchanged ms   partial bytes  exchanged bytes   difference"]
    for row in rows:
        lines.append(
            f"{row.tokens:12,} {row.partial_ms:12.2f} {row.exchanged_ms:13.2f} {row.partial_bytes:15,} {row.exchanged_bytes:16,}"
            f" {row.difference:12.1e}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(prog="bench cross", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args(argv)
    print("\n".join(format_rows(measure(options.ranks))))
    return 0


def _run_rank(rank: int, world_size: int, directory: str, lengths: tuple[int, ...], results: SimpleQueue) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=5))
    rows = [compare(CollectiveTransport(), tokens) for tokens in lengths]
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
