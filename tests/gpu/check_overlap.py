"""Exchange beside attention on real streams, one of the checks of tests/gpu/check.sh. The exit status is 0 if it passed.

Two ranks, on one GPU if there is only one. Groups of heads must give the bits of one exchange of all heads, however long either
stream is held up, and exchanges must be under way while the other stream attends.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from distributed.ranks import run_ranks  # noqa: E402

from sp_core.attention.head_groups import Overlap  # noqa: E402
from sp_core.attention.ulysses import ulysses_attention  # noqa: E402
from sp_core.comm.lane import StreamLane  # noqa: E402
from sp_core.comm.transports.peer import PeerTransport  # noqa: E402

Span = tuple[torch.cuda.Event, torch.cuda.Event]


def spanned(spans: list[Span], call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``call``, and when it began and ended on the current stream."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    out = call()
    last.record()
    spans.append((first, last))
    return out


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def equal(rank: int, world_size: int, method: str) -> int:
    """Cases in which groups gave other bits than one exchange."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    transport, lane = PeerTransport.create(method=method, timeout_s=30), StreamLane(device)  # type: ignore[arg-type]
    shared, own, wrong = random.Random(1), random.Random(rank), 0

    def held_up(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(own.randint(0, 2_000_000))
        return sdpa(q, k, v)

    for number in range(40):
        counts = [shared.randint(1, 700) for _ in range(world_size)]
        heads, groups = shared.randint(2, 24), shared.randint(2, 5)
        generator = torch.Generator(device).manual_seed(100 * rank + number)
        q, k, v = (torch.randn(1, counts[rank], heads, 64, device=device, generator=generator).bfloat16() for _ in range(3))
        one = ulysses_attention(q, k, v, transport, counts, held_up)
        several = ulysses_attention(q, k, v, transport, counts, held_up, overlap=Overlap(lane, groups))
        # memory that the side stream might still read is taken and written to at once
        del q, k, v
        spoiled = [torch.full((1, counts[rank], heads, 64), torch.nan, device=device, dtype=torch.bfloat16) for _ in range(3)]
        wrong += not torch.equal(one, several)
        del spoiled
    transport.check()
    transport.close()
    return wrong


def timeline(rank: int, world_size: int) -> float:
    """Milliseconds in which an exchange was under way while this rank attended."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    transport, lane = PeerTransport.create(method="copy", timeout_s=30), StreamLane(device)
    counts = [8192] * world_size
    q, k, v = (torch.randn(1, counts[rank], 32, 128, device=device).bfloat16() for _ in range(3))
    exchanged: list[Span] = []
    attended: list[Span] = []
    scatter = transport.scatter_heads

    def spanned_scatter(*arguments: object) -> list[torch.Tensor]:
        return spanned(exchanged, lambda: scatter(*arguments))  # type: ignore[arg-type, return-value]

    transport.scatter_heads = spanned_scatter  # type: ignore[method-assign]
    for _ in range(3):
        exchanged.clear(), attended.clear()
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        ulysses_attention(q, k, v, transport, counts, lambda *qkv: spanned(attended, lambda: sdpa(*qkv)), overlap=Overlap(lane, 4))
        transport.check()

    def times(spans: list[Span]) -> list[tuple[float, float]]:
        return [(start.elapsed_time(first), start.elapsed_time(last)) for first, last in spans]

    common = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in times(exchanged) for b in times(attended))
    transport.close()
    return common


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    started = time.monotonic()
    for method in ("copy", "kernel"):
        wrong = run_ranks(options.ranks, equal, method)
        assert not any(wrong), f"{method}: {wrong} of 40 attentions differ"
    common = run_ranks(options.ranks, timeline)
    assert min(common) > 0, f"no exchange was under way while a rank attended: {common} ms"
    print(f"PASS  overlap: bit-equal; {min(common):.1f} ms at the same time ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
