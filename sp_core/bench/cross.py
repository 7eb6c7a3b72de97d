"""Video-to-audio attention in two forms: keys and values are exchanged, or partial results are merged.

Both give the same numbers. One sample lasts from the first rank's start to the last rank's
end; the two forms take turns, so that a busy machine is equally busy for both.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..attention.partial import exchanged_cross_attention, partial_cross_attention
from ..comm.transport import Transport
from ..comm.transports.collective import CollectiveTransport
from ..layout import shard_sizes
from .ranks import rows_of_ranks, span_ms
from .turns import turns

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

    forms = {"partial": partial_cross_attention, "exchanged": exchanged_cross_attention}
    out: dict[str, torch.Tensor] = {}
    sent: dict[str, int] = {}

    def sample(name: str) -> float:
        def call() -> None:
            out[name] = forms[name](query, keys, values, transport, counts)

        before = transport.stats.bytes_sent
        took_ms = span_ms(call, query.device)
        sent[name] = transport.stats.bytes_sent - before
        return took_ms

    medians_ms = turns({name: partial(sample, name) for name in forms}, SAMPLES, WARM_UP)
    difference = float((out["partial"].float() - out["exchanged"].float()).abs().max() / out["exchanged"].float().abs().max())
    return CrossRow(
        tokens=tokens,
        dtype=str(dtype).removeprefix("torch."),
        partial_ms=medians_ms["partial"],
        exchanged_ms=medians_ms["exchanged"],
        partial_bytes=sent["partial"],
        exchanged_bytes=sent["exchanged"],
        difference=difference,
    )


def measure(ranks: int, lengths: Sequence[int] = TOKENS) -> list[CrossRow]:
    """Spawns CPU ranks joined by gloo, measures every length, returns rank 0's rows."""
    return list(rows_of_ranks(ranks, "gloo", _rows_of_lengths, tuple(lengths)))


def _rows_of_lengths(directory: str, lengths: tuple[int, ...]) -> Iterator[CrossRow]:
    for tokens in lengths:
        yield compare(CollectiveTransport(), tokens)


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


if __name__ == "__main__":
    raise SystemExit(main())
