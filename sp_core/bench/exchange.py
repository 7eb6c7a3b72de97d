"""How fast ranks exchange heads on this machine: every transport that works here, and a plain memory copy.

One sample is what an attention block does: q, k and v to head shards in one exchange, then the output back. All methods
take their turns within one run, so that a busy machine is equally busy for all of them. A sample lasts from the first
rank's start to the last rank's end.

The copy moves the same bytes from the same tensors into buffers that are already there: no exchange can be faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ..comm.choice import all_gather_facts, decide
from ..comm.errors import TransportUnavailable
from ..comm.registry import TRANSPORTS, TransportSpec
from ..comm.small_collectives import all_gather_ints
from ..comm.transport import Transport
from ..layout import shard_sizes
from .ranks import rows_of_ranks, span_ms
from .turns import turns

#: (name, (B, T, H, D)) of self-attention in models of interest, at sizes that are divided by :func:`scaled_shapes`
SHAPES = (
    ("LTX-2 audio", (1, 126, 32, 64)),
    ("LTX-2 768x512x121", (1, 6144, 32, 128)),
    ("LTX-2 1280x704x121", (1, 14080, 32, 128)),
    ("LTX-2 1280x704x121, one token more", (1, 14081, 32, 128)),
    ("LTX-2 768x512x49, cond and uncond", (2, 2688, 32, 128)),
    ("Wan-14B 832x480x81", (1, 32760, 40, 128)),
    ("Wan-14B 832x480x81, one token more", (1, 32761, 40, 128)),
    ("Wan-1.3B 832x480x81", (1, 32760, 12, 128)),
    ("Wan-1.3B 832x480x81, one token more", (1, 32761, 12, 128)),
)
SAMPLES = 9
WARM_UP = 2
#: bytes of one (B, T, H, D) tensor, all ranks together
LARGEST_TENSOR = 96 << 20
#: bytes that one rank moves in a sample: small exchanges are repeated to get there
SAMPLE_BYTES = 24 << 20


@dataclass
class Row:
    """One shape, and how long each method takes."""

    name: str
    shape: list[int]
    dtype: str
    ranks: int
    bytes_per_rank: int
    bit_exact: bool
    #: transport or "memcpy" -> milliseconds for a whole block (q, k, v there and the output back), median
    times_ms: dict[str, float]

    def plain(self) -> dict[str, object]:
        """As values for JSON, ``<method>_ms`` for each method."""
        fields = {name: value for name, value in vars(self).items() if name != "times_ms"}
        return fields | {f"{method}_ms": value for method, value in self.times_ms.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench exchange``. Returns the exit status: 0 if every transport was bit-exact."""
    parser = argparse.ArgumentParser(prog="bench exchange", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the tensors live")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure only shapes whose name contains TEXT")
    options = parser.parse_args(argv)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for row in measure(options.ranks, device, options.only):
        rows.append(row)
        print("\n".join(format_row(row, heading=len(rows) == 1)), flush=True)
    if options.json:
        print(json.dumps({"rows": [row.plain() for row in rows]}), flush=True)
    return 0 if rows and all(row.bit_exact for row in rows) else 1


def format_row(row: Row, *, heading: bool) -> list[str]:
    """Lines of a table for people: a column for each method that was measured."""
    widths = {name: max(10, len(name) + 2) for name in row.times_ms}
    first = "milliseconds".ljust(66) + "".join(name.rjust(width) for name, width in widths.items()) + "   bit-exact"
    times = "".join(f"{row.times_ms[name]:{width}.3f}" for name, width in widths.items())
    line = f"{row.name} {tuple(row.shape)}".ljust(66) + times + ("   yes" if row.bit_exact else "   NO")
    return [first, line] if heading else [line]


def scaled_shapes(world_size: int, largest: int = LARGEST_TENSOR, element_size: int = 2) -> list[tuple[str, tuple[int, ...]]]:
    """:data:`SHAPES` with T divided until a tensor fits ``largest`` bytes; a remainder of tokens stays uneven."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for name, (B, T, H, D) in SHAPES:
        divisor = -(-B * T * H * D * element_size // largest)
        extra = 1 if name.endswith("more") else 0
        tokens = max((T - extra) // divisor // world_size, 1) * world_size + extra
        shapes.append((f"{name}, 1/{divisor}" if divisor > 1 else name, (B, tokens, H, D)))
    return shapes


def measure(ranks: int, device: str, only: str = "") -> Iterator[Row]:
    """Spawns the ranks and yields each shape's row when it has been measured.

    Args:
        only: measures the shapes whose name contains this text.

    Raises:
        RuntimeError: a rank ended early; its own error is on stderr.
    """
    yield from rows_of_ranks(ranks, "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", _rows_of_shapes, device, only)


def _rows_of_shapes(directory: str, kind: str, only: str) -> Iterator[Row]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = _device(kind, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    transports = _transports(device, directory)
    for name, shape in scaled_shapes(world_size):
        if only.lower() in name.lower():
            yield _measure_shape(name, shape, torch.bfloat16, transports, device)
    all_gather_ints(None, [0])
    for transport in transports.values():
        transport.close()


def _device(kind: str, rank: int) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank % torch.cuda.device_count())


def _transports(device: torch.device, directory: str) -> dict[str, Transport]:
    """Everything that can be measured here, the fastest first. Collective."""
    decision = decide(all_gather_facts(None, device))
    spec, found, left_out = TransportSpec(None, device, directory), {}, dict(decision.refused)
    for row in TRANSPORTS:
        if row.name not in decision.order:
            continue
        try:
            found[row.name] = row.make(spec)
        except TransportUnavailable as reason:
            left_out[row.name] = str(reason)
    if dist.get_rank() == 0:
        for name, why in left_out.items():
            print(f"{name}: not measured: {why}", file=sys.stderr)
    return found


def _measure_shape(name: str, shape: tuple[int, ...], dtype: torch.dtype, transports: dict[str, Transport], device: torch.device) -> Row:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    B, T, H, D = shape
    counts = shard_sizes(T, world_size)
    generator = torch.Generator().manual_seed(rank)
    qkv_BtHD = [torch.randn(B, counts[rank], H, D, generator=generator).to(device, dtype) for _ in range(3)]
    out_BThD = torch.randn(B, T, shard_sizes(H, world_size)[rank], D, generator=generator).to(device, dtype)
    sources = [*qkv_BtHD, out_BThD]
    buffers = [torch.empty_like(tensor) for tensor in sources]

    def block(transport: Transport) -> list[torch.Tensor]:
        return [*transport.scatter_heads(qkv_BtHD, counts), transport.gather_heads(out_BThD, H, counts)]

    def copy() -> None:
        for buffer, tensor in zip(buffers, sources, strict=True):
            buffer.copy_(tensor)

    methods: dict[str, Callable[[], object]] = {key: partial(block, transport) for key, transport in transports.items()}
    methods["memcpy"] = copy
    size = sum(tensor.numel() * tensor.element_size() for tensor in sources)
    repeats = max(1, min(50, SAMPLE_BYTES // max(size, 1)))
    reference = block(next(iter(transports.values())))
    exact = all(torch.equal(a, b) for transport in transports.values() for a, b in zip(reference, block(transport), strict=True))
    del reference
    timed = {key: partial(span_ms, method, device, repeats) for key, method in methods.items()}
    medians = {key: took_ms / repeats for key, took_ms in turns(timed, SAMPLES, WARM_UP).items()}
    exact = all(flag for (flag,) in all_gather_ints(None, [exact]))
    return Row(name, list(shape), str(dtype).removeprefix("torch."), world_size, size, exact, medians)


if __name__ == "__main__":
    sys.exit(main())
