"""Block-sparse attention of LongCat-Video's refining pass against dense attention, by how much it leaves out.

One head after another is what a device computes under sequence parallelism, so a few heads tell the
speed. Both take turns, so that a busy machine is equally busy for both.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ..attention.block_sparse import BlockSparse, block_sparse_attention, tile_counts
from .turns import turns

#: 1280 x 768 pixels are 48 x 80 tokens. 8 latent frames on a CPU, 30,720 tokens; 48 elsewhere, 184,320
CPU_GRID, GPU_GRID = (8, 48, 80), (48, 48, 80)
HEADS, HEAD_DIM = 1, 128
SPARSITIES = (0.5, 0.75, 0.875, 0.9375)
SAMPLES = 3


@dataclass(frozen=True)
class SparseRow:
    """One sparsity. Milliseconds are medians."""

    sparsity: float
    tiles: int
    kept: int
    dense_ms: float
    sparse_ms: float

    @property
    def skipped(self) -> float:
        """Share of pairs of tiles that are not computed."""
        return 1 - self.kept / self.tiles


def measure(
    grid: Sequence[int], heads: int, device: str, dtype: torch.dtype, sparsities: Sequence[float] = SPARSITIES, flex: bool = False
) -> list[SparseRow]:
    """Random tokens of ``grid`` (frames, rows, columns), attended to densely and sparsely, with ``flex`` by torch's flex_attention."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, math.prod(grid), HEAD_DIM, generator=generator).to(device, dtype) for _ in range(3))
    methods: dict[str, Callable[[], float]] = {"dense": lambda: _milliseconds(lambda: nnf.scaled_dot_product_attention(q, k, v), device)}
    for sparsity in sparsities:
        setting = BlockSparse(sparsity, flex=flex)
        methods[str(sparsity)] = lambda setting=setting: _milliseconds(  # type: ignore[misc]
            lambda: block_sparse_attention(q, k, v, grid, grid, setting), device
        )
    medians = turns(methods, SAMPLES)
    tiles = math.prod(tile_counts(grid, BlockSparse().key_tile))
    return [SparseRow(s, tiles, BlockSparse(s).kept(grid), medians["dense"], medians[str(s)]) for s in sparsities]


def _milliseconds(call: Callable[[], Tensor], device: str) -> float:
    started = time.perf_counter()
    call()
    if device != "cpu":
        torch.accelerator.synchronize()
    return 1000 * (time.perf_counter() - started)


def format_rows(rows: Sequence[SparseRow]) -> list[str]:
    """A table for people."""
    lines = ["sparsity   tiles    kept   skipped    dense ms   sparse ms   times as fast"]
    for row in rows:
        lines.append(
            f"{row.sparsity:8.4f} {row.tiles:7} {row.kept:7} {row.skipped:8.1%} {row.dense_ms:11.1f} {row.sparse_ms:11.1f} "
            f"{row.dense_ms / row.sparse_ms:15.2f}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(prog="bench sparse", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--frames", type=int, help="latent frames of 48 x 80 tokens (default 8 on a CPU, 48 elsewhere)")
    parser.add_argument("--heads", type=int, default=HEADS, help="heads (default 1)")
    parser.add_argument("--flex", action="store_true", help="by torch's flex_attention, on cuda only")
    options = parser.parse_args(argv)
    if options.flex and not options.device.startswith("cuda"):
        parser.error("--flex is for --device cuda: a CPU gathers either way")
    grid = CPU_GRID if options.device == "cpu" else GPU_GRID
    grid = (options.frames or grid[0], *grid[1:])
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    print(f"{math.prod(grid):,} tokens ({grid[0]} x {grid[1]} x {grid[2]}), {options.heads} heads of {HEAD_DIM}, {dtype}")
    print("\n".join(format_rows(measure(grid, options.heads, options.device, dtype, flex=options.flex))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
