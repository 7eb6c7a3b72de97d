"""The checks of tests/gpu/check.sh, one a subcommand. Prints one line each; the exit status is 0 if it passed."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from distributed.exchange_cases import same_bytes  # noqa: E402
from distributed.ranks import run_ranks  # noqa: E402

from sp_core.comm.errors import ExchangeError  # noqa: E402
from sp_core.comm.native.addresses import Exchange, ExchangeKind  # noqa: E402
from sp_core.comm.native.build import load_cuda  # noqa: E402
from sp_core.comm.native.cpu import CExchange  # noqa: E402
from sp_core.comm.native.cuda import CLaunch, CStatus, CudaLibrary  # noqa: E402
from sp_core.comm.transports.peer import PeerTransport, block_count  # noqa: E402
from sp_core.comm.transports.peer_memory import Window  # noqa: E402
from sp_core.layout import shard_range  # noqa: E402

# (token counts for two ranks, repeated for more; B, H, D, tensors, dtype)
SHAPES = (
    ((512, 512), 1, 32, 128, 3, torch.bfloat16),
    ((513, 512), 1, 32, 128, 3, torch.bfloat16),
    ((2048, 2047), 2, 12, 128, 3, torch.bfloat16),
    ((100, 0), 1, 40, 128, 2, torch.float16),
    ((7, 9), 3, 5, 3, 3, torch.uint8),
    ((33, 31), 1, 1, 64, 1, torch.float32),
    ((5, 6), 2, 7, 9, 4, torch.float8_e4m3fn),
    ((3000, 3001), 1, 24, 72, 3, torch.bfloat16),
)


def use_device(rank: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def poison(transport: PeerTransport) -> None:
    """Fills the slots that nobody uses or may write yet."""
    transport._memory.reclaim()
    for slot in transport._memory.free:
        torch.as_tensor(Window(transport._memory.window(slot), 0, transport._memory.slot_bytes), device="cuda").fill_(0xA5)


def exact(rank: int, world_size: int, method: str) -> int:
    device, cases = use_device(rank), 0
    transport = PeerTransport.create(method=method, timeout_s=30)  # type: ignore[arg-type]
    for again in range(3):
        for number, (pair, B, H, D, n, dtype) in enumerate(SHAPES):
            counts = [pair[r % 2] for r in range(world_size)]
            T, start = sum(counts), sum(counts[:rank])
            low, high = shard_range(H, world_size, rank)
            generator = torch.Generator(device).manual_seed(100 * again + number)
            size = (n, B, T, H, D * dtype.itemsize)
            whole = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator).view(dtype)
            mine = whole[:, :, start : start + counts[rank]]
            poison(transport)
            scattered = transport.scatter_heads(list(mine), counts)
            poison(transport)
            back = [transport.gather_heads(tensor, H, counts) for tensor in scattered]
            gathered = transport.all_gather_tokens(mine[0], counts)
            for index in range(n):
                assert same_bytes(scattered[index], whole[index][:, :, low:high]), f"rank {rank}: scatter {pair, B, H, D, dtype}"
                assert same_bytes(back[index], mine[index]), f"rank {rank}: gather {pair, B, H, D, dtype}"
            assert same_bytes(gathered, whole[0]), f"rank {rank}: all-gather {pair, B, H, D, dtype}"
            del scattered, back, gathered
            cases += 1
        transport.trim()  # the next round grows the slots again
    transport.close()
    return cases


def race(rank: int, world_size: int, exchanges: int) -> int:
    """Exchanges without a pause, ranks delayed at random; every element of every output is compared on the device."""
    device = use_device(rank)
    transport = PeerTransport.create(method="kernel", timeout_s=60)
    own, shared = random.Random(rank), random.Random(1)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(exchanges):
        B, H, D = 1, shared.randint(1, 8), 4 * shared.randint(1, 16)
        counts = [shared.randint(0, 64) for _ in range(world_size)]
        T, start = sum(counts), sum(counts[:rank])
        low, high = shard_range(H, world_size, rank)
        whole = torch.arange(B * T * H * D, dtype=torch.int32, device=device).view(B, T, H, D) + number * 1_000_003
        if own.random() < 0.2:
            torch.cuda._sleep(own.randint(1, 200_000))
        (have,) = transport.scatter_heads([whole[:, start : start + counts[rank]]], counts)
        kept.append((have, whole[:, :, low:high]))
        while len(kept) > own.randint(0, 3):
            have, want = kept.pop(0)
            wrong += (have != want).sum()
            have.fill_(-1)
            del have, want
        if number % 500 == 0:
            transport.check()
    for have, want in kept:
        wrong += (have != want).sum()
    transport.check()
    assert int(wrong) == 0, f"rank {rank}: {int(wrong)} wrong elements"
    kept.clear()
    transport.close()
    return exchanges


def late(rank: int, world_size: int) -> str:
    """The last rank stays away; the others must be told so, by an error on the host and with a device that still works."""
    device = use_device(rank)
    transport = PeerTransport.create(method="kernel", timeout_s=2)
    x = torch.ones(1, 4, world_size, 16, device=device)
    text = "stayed away"
    if rank != world_size - 1:
        try:
            transport.scatter_heads([x], [4] * world_size)
            transport.check()
            text = "no error"
        except ExchangeError as error:
            text = str(error)
        assert int((x + 1).sum()) == 2 * x.numel()  # no trap: the context is alive
    dist.barrier()
    transport.close()
    return text


class LocalRanks:
    """Two ranks of one process on two streams: what the kernel can do without the scheduler switching processes."""

    def __init__(self, exchange: Exchange) -> None:
        handle, reason = load_cuda()
        assert handle is not None, reason
        self.library = CudaLibrary(handle, 0)
        self.exchange = exchange
        self.world_size = exchange.world_size
        self.slot_bytes = max(exchange.slot_bytes(rank) for rank in range(self.world_size))
        self.bases = [self.library.allocate(self.library.slots_offset + 2 * self.slot_bytes)[0] for _ in range(self.world_size)]
        self.status = [self.library.allocate_status() for _ in range(self.world_size)]
        self.streams = [torch.cuda.Stream() for _ in range(self.world_size)]
        self.blocks = block_count(exchange, self.library.multiprocessors())
        self.epoch = 0

    def run(self, sources: list[list[torch.Tensor]]) -> None:
        self.epoch += 1
        for rank, stream in enumerate(self.streams):
            launch = CLaunch(
                exchange=CExchange.of(self.exchange),
                rank=rank,
                blocks=self.blocks,
                fixed_slot=0,
                epoch=self.epoch,
                slot_bytes=self.slot_bytes,
                status=self.status[rank][1],
            )
            for index, tensor in enumerate(sources[rank]):
                launch.sources[index] = tensor.data_ptr()
                launch.source_batch[index] = tensor.stride(0) * tensor.element_size()
                launch.source_token[index] = tensor.stride(1) * tensor.element_size()
            for peer, base in enumerate(self.bases):
                launch.peers[peer] = base
            self.library.push(launch, stream.cuda_stream)

    def close(self) -> None:
        torch.cuda.synchronize()
        for host, _ in self.status:
            status = CStatus.from_address(host)
            assert status.completed == self.epoch
            assert not any(status.late)
            self.library.free_status(host)
        for base in self.bases:
            self.library.free(base)


def milliseconds(run: object, streams: list[torch.cuda.Stream]) -> float:
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        main = torch.cuda.current_stream()
        first.record(main)
        for stream in streams:
            stream.wait_stream(main)
        run()  # type: ignore[operator]
        for stream in streams:
            main.wait_stream(stream)
        last.record(main)
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return sorted(times[3:])[len(times[3:]) // 2]


def bandwidth() -> str:
    lines, good = [], True
    for tokens in (1024, 4096, 16384):
        counts = (tokens, tokens)
        exchange = Exchange(ExchangeKind.SCATTER_HEADS, 3, 1, 32, 256, counts)
        ranks = LocalRanks(exchange)
        sources = [[torch.randn(1, tokens, 32, 128, device="cuda").bfloat16() for _ in range(3)] for _ in counts]
        ours = milliseconds(lambda ranks=ranks, sources=sources: ranks.run(sources), ranks.streams)
        flat = torch.cat([tensor.flatten() for shard in sources for tensor in shard])
        target = torch.empty_like(flat)
        copy = milliseconds(lambda target=target, flat=flat: target.copy_(flat), [])
        size = flat.numel() * 2
        ranks.close()
        lines.append(f"{size >> 20} MB {size / ours / 1e6:.0f} GB/s, copy {size / copy / 1e6:.0f} GB/s, {100 * copy / ours:.0f} %")
        good &= size < 64 << 20 or copy / ours >= 0.8
        del flat, target, sources
    assert good, "; ".join(lines)
    return "; ".join(lines)


def sanitize() -> str:
    exchange = Exchange(ExchangeKind.SCATTER_HEADS, 3, 2, 5, 6, (7, 4))
    ranks = LocalRanks(exchange)
    sources = [[torch.randn(2, count, 5, 3, device="cuda").bfloat16() for _ in range(3)] for count in exchange.token_counts]
    for _ in range(5):
        ranks.run(sources)
    ranks.close()
    return "5 exchanges"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=("build", "exact", "race", "late", "bandwidth", "sanitize"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--method", choices=("kernel", "copy"), default="kernel")
    parser.add_argument("--exchanges", type=int, default=10_000)
    options = parser.parse_args()
    started = time.monotonic()
    if options.check == "build":
        handle, reason = load_cuda()
        assert handle is not None, reason
        CudaLibrary(handle, 0)
        result = torch.cuda.get_device_name(0)
    elif options.check == "exact":
        cases = run_ranks(options.ranks, exact, options.method)
        result = f"{options.ranks} ranks, {options.method}: {cases[0]} cases bit-exact"
    elif options.check == "race":
        result = f"{options.ranks} ranks, {run_ranks(options.ranks, race, options.exchanges)[0]} exchanges"
    elif options.check == "late":
        texts = run_ranks(options.ranks, late)
        assert all(f"rank {options.ranks - 1}" in text for text in texts[:-1]), texts
        result = texts[0]
    else:
        result = bandwidth() if options.check == "bandwidth" else sanitize()
    print(f"PASS  {options.check}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
