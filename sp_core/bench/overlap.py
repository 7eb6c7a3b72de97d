"""What of an exchange stays exposed when heads go in groups, on a link that is slow on purpose.

CPU ranks attend to a sequence together. The link takes a share of the time that attention takes, and leaves the processor free
meanwhile, as a copy engine leaves a GPU's multiprocessors. The planner chooses the number of groups. Free link, slow link and slow
link with groups take turns within one run; a sample lasts from the first rank's start to the last rank's end.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.head_groups import Overlap
from ..attention.ulysses import ulysses_attention
from ..comm.lane import ThreadLane
from ..comm.registry import TransportSpec, make_shm
from ..comm.small_collectives import all_gather_ints
from ..comm.transports.slow import SlowTransport
from ..demo.machine_line import machine_line
from ..planner.overlap import best_groups, even_groups, exposed_s
from ..planner.traffic import attention_bytes
from .ranks import rows_of_ranks, span_ms
from .turns import turns

#: of the time of attention, that an exchange takes on the link
SHARES = (0.2, 0.5, 0.9)
RANKS = (2, 4)
#: of all ranks: some hundredths, and some tenths of a second of attention on one core
TOKENS = (1024, 2048)
#: of each rank
HEADS, HEAD_DIM = 8, 64
SAMPLES = 7


@dataclass(frozen=True)
class OverlapRow:
    """Medians in seconds of one attention with its exchange."""

    ranks: int
    tokens: int
    share: float
    groups: int
    attention_s: float
    link_s: float
    free_s: float
    alone_s: float
    grouped_s: float

    @property
    def exposed_s(self) -> float:
        return self.grouped_s - self.free_s

    @property
    def formula_s(self) -> float:
        return exposed_s(self.link_s, self.attention_s, even_groups(HEADS, self.groups))

    @property
    def error(self) -> float:
        """Of the time that is predicted of a free link's."""
        return (self.free_s + self.formula_s) / self.grouped_s - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench overlap``; 0."""
    parser = argparse.ArgumentParser(prog="bench overlap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS), help="processes (default 2 and 4)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"samples a median is taken of (default {SAMPLES})")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    print(f"machine: {machine_line()}", flush=True)
    rows: list[OverlapRow] = []
    for ranks in options.ranks:
        found = measure(ranks, options.samples)
        print("\n".join(format_rows(found, heading=not rows)), flush=True)
        rows += found
    print("milliseconds. exposed: what groups take more than a free link; formula: max(x/G, x - a(G-1)/G); of free: groups against a")
    print("free link; predicted: how far a free link and the formula together are from what groups take")
    if options.json:
        print(json.dumps({"rows": [{**asdict(row), "exposed_s": row.exposed_s, "formula_s": row.formula_s} for row in rows]}))
    return 0


def format_rows(rows: Sequence[OverlapRow], *, heading: bool = True) -> list[str]:
    """A table for people."""
    columns = ("ranks", "tokens", "share", "G", "attention", "link", "free link", "alone", "groups", "exposed", "formula", "of free")
    lines = ["".join(f"{name:>10}" for name in (*columns, "predicted"))] if heading else []
    for row in rows:
        times = (row.attention_s, row.link_s, row.free_s, row.alone_s, row.grouped_s, row.exposed_s, row.formula_s)
        cells = [f"{row.ranks}", f"{row.tokens}", f"{row.share:.0%}", f"{row.groups}", *(f"{1e3 * seconds:.1f}" for seconds in times)]
        lines.append("".join(f"{cell:>10}" for cell in [*cells, f"{row.grouped_s / row.free_s:.2f}", f"{row.error:+.0%}"]))
    return lines


def measure(ranks: int, samples: int = SAMPLES) -> list[OverlapRow]:
    """A row for each of :data:`TOKENS` and :data:`SHARES`, from ``ranks`` spawned CPU ranks.

    Raises:
        RuntimeError: a rank ended early; its own error is on stderr.
    """
    return list(rows_of_ranks(ranks, "gloo", _rows, samples))


def _rows(directory: str, samples: int) -> Iterator[OverlapRow]:
    link = SlowTransport(make_shm(TransportSpec(None, torch.device("cpu"), directory)), math.inf)
    lane = ThreadLane()
    try:
        for tokens in TOKENS:
            bench = _Bench(link, lane, tokens)
            for share in SHARES:
                yield bench.row(share, samples)
    finally:
        lane.close()
        link.close()


class _Bench:
    """One rank's part. Everything is collective."""

    def __init__(self, link: SlowTransport, lane: ThreadLane, tokens: int) -> None:
        self._link, self._lane, self._tokens = link, lane, tokens
        ranks = link.world_size
        self._counts, self._heads = [tokens // ranks] * ranks, HEADS * ranks
        generator = torch.Generator().manual_seed(link.rank)
        self._shards = [torch.randn(1, tokens // ranks, self._heads, HEAD_DIM, generator=generator) for _ in range(3)]
        self._attended_s = 0.0

    def row(self, share: float, samples: int) -> OverlapRow:
        self._once(math.inf, 1)
        self._once(math.inf, 1)
        attention_s = self._slowest(median(self._attention_s() for _ in range(samples)))
        sent = attention_bytes(self._counts, 0, 1, self._heads, HEAD_DIM * 4)
        link_s = share * attention_s
        groups = best_groups(link_s, 0.0, attention_s, HEADS)
        medians = turns(
            {
                "free": lambda: self._once(math.inf, 1),
                "alone": lambda: self._once(sent / link_s, 1),
                "grouped": lambda: self._once(sent / link_s, groups),
            },
            samples,
        )
        facts = self._link.world_size, self._tokens, share, groups, attention_s, link_s
        return OverlapRow(*facts, medians["free"], medians["alone"], medians["grouped"])

    def _once(self, bandwidth: float, groups: int) -> float:
        self._link.bandwidth = bandwidth
        overlap = Overlap(self._lane, groups) if groups > 1 else None
        q, k, v = self._shards
        return span_ms(lambda: ulysses_attention(q, k, v, self._link, self._counts, self._attend, overlap=overlap), q.device) / 1e3

    def _attention_s(self) -> float:
        """Seconds of this rank's attention, while the other ranks attend too."""
        self._attended_s = 0.0
        self._once(math.inf, 1)
        return self._attended_s

    def _attend(self, q_BThD: Tensor, k_BThD: Tensor, v_BThD: Tensor) -> Tensor:
        started = time.perf_counter()
        q, k, v = (x.transpose(1, 2) for x in (q_BThD, k_BThD, v_BThD))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()
        self._attended_s += time.perf_counter() - started
        return out

    @staticmethod
    def _slowest(seconds: float) -> float:
        return max(nanoseconds for (nanoseconds,) in all_gather_ints(None, [int(1e9 * seconds)])) / 1e9
