"""A forward on ranks of which one is slower: equal shares, shares by measured speed, and the ideal of all speeds together.

The slow rank waits before each exchange in proportion to what it has computed. Where there are more ranks than cores, all ranks
wait as well, so that each has a core for long enough; a rank's work is the time that it was on one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch

from ..attention.sequence_group import SequenceGroup
from ..comm import Transport
from ..comm.registry import TransportSpec, make_shm
from ..demo.machine_line import machine_line
from ..layout import Shares
from ..parallel.rates import measure_rates
from ..parallel.slowdown import Slowdown
from ..planner.shares import auto_shares
from ..plans import Engine
from ..reference import ReferenceConfig
from ..reference.model import AudioVideoDiT
from ..reference.plan import REFERENCE
from ..reference.sample import Inputs, step_arguments
from .ranks import rows_of_ranks, span_ms

RANKS, SLOWED = (2, 3), (2.0, 3.0)
SAMPLES = 5


@dataclass(frozen=True)
class SharesRow:
    """Medians in seconds of one forward. The last of the ranks takes ``slowed`` times as long as each other one."""

    ranks: int
    slowed: float
    shares: str
    one_rank_s: float
    equal_s: float
    auto_s: float

    @property
    def ideal_s(self) -> float:
        """What ranks take that share out all work by their speeds and exchange nothing."""
        return self.one_rank_s / (self.ranks - 1 + 1 / self.slowed)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench shares``; 0."""
    parser = argparse.ArgumentParser(prog="bench shares", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS), help="processes (default 2 and 3)")
    parser.add_argument("--slowed", type=float, nargs="*", default=list(SLOWED), help="times as long as the others (default 2 and 3)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"samples a median is taken of (default {SAMPLES})")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    print(f"machine: {machine_line()}", flush=True)
    print(
        "".join(f"{name:>13}" for name in ("ranks", "slowed", "one rank s", "equal s", "auto s", "ideal s", "auto/ideal")) + "  shares",
        flush=True,
    )
    rows = []
    for ranks in options.ranks:
        for row in rows_of_ranks(ranks, "gloo", measure, options.samples, tuple(options.slowed)):
            rows.append(row)
            times = (row.one_rank_s, row.equal_s, row.auto_s, row.ideal_s, row.auto_s / row.ideal_s)
            print(f"{row.ranks:>13}{row.slowed:>13g}" + "".join(f"{value:>13.3f}" for value in times) + f"  {row.shares}", flush=True)
    if options.json:
        print(json.dumps({"rows": [{**asdict(row), "ideal_s": row.ideal_s} for row in rows]}))
    return 0


def measure(directory: str, samples: int, slowed: Sequence[float]) -> Iterator[SharesRow]:
    """One rank's part: a row for each of ``slowed``. Collective."""
    transport = make_shm(TransportSpec(None, torch.device("cpu"), directory))
    try:
        bench = _Bench(transport, samples)
        for times in slowed:
            yield bench.row(times)
    finally:
        transport.close()


class _Bench:
    """One rank's model, and how it is slowed. Everything is collective."""

    def __init__(self, transport: Transport, samples: int) -> None:
        self._transport, self._samples = transport, samples
        config = ReferenceConfig(layers=2, heads=24, head_dim=32)
        inputs = Inputs.seeded(config, 0, frames=5, rows=34, columns=44)
        self._arguments = step_arguments(inputs, inputs.video, inputs.audio, 0.5)
        self._model = AudioVideoDiT.seeded(config, 0)
        self._slowdown = Slowdown(transport.stats, work_clock=time.thread_time)
        transport.on_enter = self._slowdown.before_exchange

    def row(self, times: float) -> SharesRow:
        ranks, last = self._transport.world_size, self._transport.world_size - 1
        everybody = float(math.ceil(ranks / (os.cpu_count() or 1)))
        own = self._slowdown.factor = everybody * (times if self._transport.rank == last else 1.0)
        shares = auto_shares(measure_rates(self._transport, torch.device("cpu"), torch.float32, slowed=own, clock=time.thread_time))
        self._shared_out(shares)
        one, equal, auto = (
            self._median(call) for call in (self._alone, partial(self._shared_out, None), partial(self._shared_out, shares))
        )
        return SharesRow(ranks, times, "equal" if shares is None else shares.describe(), one, equal, auto)

    def _median(self, call: Callable[[], None]) -> float:
        return median(span_ms(call, torch.device("cpu")) for _ in range(self._samples)) / 1e3

    @torch.inference_mode()
    def _shared_out(self, shares: Shares | None) -> None:
        sequence = SequenceGroup(self._transport, self._transport, shares=shares)
        with self._slowdown.forward(), Engine(REFERENCE, sequence).installed(self._model):
            self._model(**self._arguments)

    @torch.inference_mode()
    def _alone(self) -> None:
        """All of it on rank 0."""
        with self._slowdown.forward():
            if self._transport.rank == 0:
                self._model(**self._arguments)
