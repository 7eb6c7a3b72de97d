"""A forward with shared weights against one with whole weights, on ranks whose blocks are as large as a real model's.

Twice: by the exchange of CPU ranks, where each block waits for its bytes, and behind a link that is slow on purpose, where the next
block's bytes come while a block computes, beside what the planner's formula says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ..comm import Transport
from ..comm.lane import Lane, ThreadLane
from ..comm.registry import TransportSpec, make_shm
from ..comm.small_collectives import all_gather_ints
from ..comm.transports.slow import SlowTransport
from ..demo.machine_line import machine_line
from ..planner.weights import Machine, Weights, gather_s
from ..plans import Engine
from ..reference import ReferenceConfig
from ..reference.model import AudioVideoDiT
from ..reference.plan import REFERENCE
from ..reference.sample import Inputs, step_arguments
from ..weights import Gathering, SharedWeights
from ..weights.block import BlockShard, Place, places_of
from ..weights.tensors import Apart, take_apart
from .ranks import rows_of_ranks, span_ms
from .turns import turns

RANKS, SAMPLES = (2, 4), 5
#: more than this times whole weights is too much
BAR = 1.25
#: seconds of the slow link in a forward, in parts of what the forward takes with whole weights
SLOW = 0.5


@dataclass(frozen=True)
class WeightsRow:
    """Medians in seconds of one forward."""

    ranks: int
    block_mb: float
    tokens: int
    whole_s: float
    shared_s: float
    slow_s: float
    formula_s: float

    @property
    def ratio(self) -> float:
        return self.shared_s / self.whole_s


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench weights``; 0."""
    parser = argparse.ArgumentParser(prog="bench weights", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS), help="processes (default 2 and 4)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"samples a median is taken of (default {SAMPLES})")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    print(f"machine: {machine_line()}", flush=True)
    names = ("ranks", "block MB", "tokens", "whole s", "shared s", "ratio", "slow link s", "formula s")
    print("".join(f"{name:>12}" for name in names), flush=True)
    rows = []
    for ranks in options.ranks:
        for row in rows_of_ranks(ranks, "gloo", measure, options.samples):
            rows.append(row)
            times = (row.whole_s, row.shared_s, row.ratio, row.slow_s, row.formula_s)
            shown = "".join(f"{value:>12.3f}" for value in times) + ("" if row.ratio <= BAR else "   ABOVE")
            print(f"{row.ranks:>12}{row.block_mb:>12.0f}{row.tokens:>12}{shown}", flush=True)
    if options.json:
        print(json.dumps({"rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}))
    return 0


def measure(directory: str, samples: int) -> Iterator[WeightsRow]:
    """One rank's part. Collective."""
    spec = TransportSpec(None, torch.device("cpu"), directory)
    tokens, link, lane = make_shm(spec), SlowTransport(make_shm(spec), math.inf), ThreadLane()
    link.hold_little()
    try:
        bench = _Bench(tokens)
        weights = bench.weights
        fast = turns({"whole": bench.whole, "shared": partial(bench.shared, link.inner, None)}, samples)
        # equal on all ranks, as the bytes of the link are
        whole_s = max(count for (count,) in all_gather_ints(None, [int(1e9 * fast["whole"])])) / 1e9
        link.bandwidth = bench.shared_out.gathered_bytes / (SLOW * whole_s)
        slow = turns({"slow": partial(bench.shared, link, lane)}, samples)
        machine = Machine(tokens.world_size, math.inf, link.bandwidth, math.inf)
        formula_s = whole_s + gather_s(weights, whole_s, machine)
        yield WeightsRow(tokens.world_size, weights.largest / 1e6, bench.tokens, whole_s, fast["shared"], slow["slow"], formula_s)
    finally:
        lane.close()
        link.close()
        tokens.close()


class _Bench:
    """One rank's model, whole and shared out. Everything is collective."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        config = ReferenceConfig(layers=4, heads=12, head_dim=128)
        inputs = Inputs.seeded(config, 0, frames=5, rows=24, columns=32)
        self.tokens = inputs.tokens
        self._arguments = step_arguments(inputs, inputs.video, inputs.audio, 0.5)
        self._model = AudioVideoDiT.seeded(config, 0)
        rank, ranks, blocks = transport.rank, transport.world_size, REFERENCE.blocks_of(self._model)
        shards = [BlockShard(number, apart(block), rank, ranks, torch.device("cpu")) for number, block in enumerate(blocks)]
        self.shared_out = SharedWeights(shards, ranks)
        self.weights = Weights.of([shard.block_bytes for shard in shards], sum(weight.nbytes for weight in self._model.parameters()))

    def whole(self) -> float:
        return self._seconds(contextlib.nullcontext)

    def shared(self, transport: Transport, lane: Lane | None) -> float:
        following: dict[int, int] = {}
        return self._seconds(lambda: self.shared_out.gathering(transport, lane, following))

    @torch.inference_mode()
    def _seconds(self, gathering: Callable[[], AbstractContextManager[Gathering | None]]) -> float:
        def forward() -> None:
            with gathering() as weights, Engine(REFERENCE, self._transport, weights=weights).installed(self._model):
                self._model(**self._arguments)

        return span_ms(forward, torch.device("cpu")) / 1e3


def apart(block: torch.nn.Module) -> list[tuple[Sequence[Place], Apart]]:
    """The places of each weight of a block, and the plain tensors that it is made of."""
    found: dict[int, Any] = {}
    for place in places_of(block):
        found.setdefault(id(place.weight), ([], take_apart(place.weight)))[0].append(place)
    return list(found.values())
